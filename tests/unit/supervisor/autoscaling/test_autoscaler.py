"""The facts that the scaler gathers, and what it makes of the real policy's decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from servekit.config.schema import ModelConfig
from servekit.protocol.messages import Pong, Traffic
from servekit.protocol.types import ScaleStatus
from servekit.supervisor.autoscaling.autoscaler import Row, Scaler, least_to_lose
from servekit.supervisor.autoscaling.capacity import NoCapacity
from servekit.supervisor.autoscaling.policy import ScalingInput
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.event_log import journal
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpu.gpus import Gpu, Slot
from tests.unit.supervisor.made_up_deployment import config, info

GPU = Gpu(0, "GPU-0", "H200", 100, 100)
NOW = StartReason.from_supervisor_start()


@dataclass(eq=False)
class Replica:
    """A worker as the scaler sees it."""

    place: Assignment
    state: str = "ready"
    reason: str = ""
    ending: bool = False
    liveness: Any = field(default_factory=lambda: SimpleNamespace(last=Pong(0, 0.0, 0, 0, 0.0)))

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def serves(self) -> bool:
        return self.state == "ready"

    def says(self, **figures: Any) -> Replica:
        """Report these figures."""
        self.liveness.last = msgspec.structs.replace(self.liveness.last, **figures)
        return self


@dataclass(eq=False)
class MadeUp:
    """A deployment that does as it is told, at once."""

    model: ModelConfig
    replicas: list[Replica] = field(default_factory=list)
    wanted: bool = True
    changing: bool = False
    info: Any = None
    scale: ScaleStatus | None = None
    published: int = 0
    causes: list[str] = field(default_factory=list)

    @property
    def living(self) -> list[Replica]:
        return [one for one in self.replicas if not one.ending]

    def grow(self, slot: Slot, occasion: StartReason) -> Replica:
        self.causes.append(occasion.cause)
        replica = Replica(Assignment(self.model.name, len(self.living), slot, 1), "starting")
        self.replicas.append(replica)
        return replica

    def shrink(self, replica: WorkerProcess) -> None:
        cast(Replica, replica).ending = True

    def changed(self) -> None:
        self.published += 1


class Scene:
    """A scaler over one model; requests wait at gateways as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
        self.made_up = MadeUp(
            config(**{"load": "on_start", "replicas": {"min": 1, "max": 4}, **keys}),
            info=info(),
        )
        self.made_up.grow((), StartReason.from_supervisor_start())
        self.made_up.living[0].state = "ready"
        self.deployments = SimpleNamespace(served=[self.made_up], halted=False)
        self.gateways = [SimpleNamespace(traffic=Traffic(0, 0, {})) for _ in range(2)]
        self.elsewhere: dict[str, str] = {}
        self.free = 9
        self.lacking: list[int] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        monkeypatch.setattr(
            journal, "record_event", lambda kind, text, **more: self.told.append((text, more))
        )
        self.scaler = Scaler(
            cast(Any, self.deployments),
            cast(Any, self.gateways),
            cast(Any, SimpleNamespace(waits_for=lambda deployment: {**self.elsewhere})),
            cast(Any, self),
        )

    def one_more(self, deployment: Deployment) -> Slot | NoCapacity:
        if not self.free:
            return NoCapacity("no GPU is free")
        self.free -= 1
        return ()

    def short(self, model: str, replicas: int) -> None:
        self.lacking.append(replicas)

    def wait(self, *queued: int, oldest_s: float = 2.0) -> None:
        """Have so many requests wait at each gateway."""
        for gateway, count in zip(self.gateways, queued, strict=False):
            gateway.traffic = Traffic(0, 0, {"a": count, "b": 9}, {}, {"a": oldest_s, "b": 99.0})

    @property
    def count(self) -> int:
        return len(self.made_up.living)

    @property
    def scale(self) -> ScaleStatus:
        assert self.made_up.scale is not None
        return self.made_up.scale

    def facts(self) -> ScalingInput:
        row = self.scaler._rows.setdefault(cast(Deployment, self.made_up), Row())
        return self.scaler._facts(cast(Deployment, self.made_up), row)


def reloaded(scene: Scene, **keys: Any) -> None:
    scene.made_up.model = config(load="on_start", **keys)


# ---------------------------------------------------------------- facts


def test_facts_are_summed_over_gateways_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.wait(3, 4)
    for state in ("ready", "starting", "loading", "failed"):
        scene.made_up.grow((), StartReason.from_supervisor_start())
        scene.made_up.living[-1].state = state
    scene.made_up.living[0].says(running=5, waiting=2, kv_used=0.5)
    scene.made_up.living[1].says(running=1, waiting=1, kv_used=0.1)
    scene.made_up.living[2].says(running=9, kv_used=0.9)
    found = scene.facts()
    assert (found.serving, found.coming, found.failing) == (2, 2, 1)
    assert (found.queued, found.waited_s, found.held, found.running) == (7, 2.0, 3, 6)
    assert found.kv_used == pytest.approx(0.3), "the average of those that serve"
    assert (found.slots, found.wanted_elsewhere, found.unborn) == (1, "", "")


def test_facts_of_a_model_that_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.made_up.living.clear()
    scene.made_up.info = None
    scene.gateways.clear()
    found = scene.facts()
    assert (found.slots, found.kv_used, found.waited_s, found.queued) == (1, 0.0, 0.0, 0)


# ---------------------------------------------------------------- up


def test_requests_that_wait_add_replicas_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.scaler.scale_deployments()
    assert scene.scale == ScaleStatus(1, 4, 1)
    scene.wait(1, 1)
    scene.scaler.scale_deployments()
    assert scene.count == 2
    assert scene.made_up.causes == ["up", "scale"]
    assert scene.scale.desired == 2
    assert scene.scale.reason == "scaled up to 2: 2 waited 2.0 s"
    assert scene.scale.at > 0
    [(said, figures)] = scene.told
    assert said == scene.scale.reason
    assert figures == {"model": "a", "replicas": 2, "queued": 2, "waited_s": 2.0, "running": 0}


def test_none_is_added_while_one_is_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.wait(9)
    scene.scaler.scale_deployments()
    scene.scaler.scale_deployments()
    assert scene.count == 2 and scene.scale.waits == ""
    scene.made_up.living[1].state = "ready"
    scene.scaler.scale_deployments()
    assert scene.count == 4, "they are doubled"
    scene.made_up.living[2].state = scene.made_up.living[3].state = "ready"
    scene.scaler.scale_deployments()
    assert scene.count == 4 and scene.scale.waits == "`max` is 4"


def test_none_is_added_while_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.made_up.grow((), StartReason.from_supervisor_start()).state = "backoff"
    scene.wait(9)
    scene.scaler.scale_deployments()
    assert scene.count == 2
    assert scene.scale.waits == "no replica is added while one is failing"


def test_what_has_no_room_is_told_once_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.made_up.grow((), StartReason.from_supervisor_start()).state = "ready"
    scene.free = 1
    scene.wait(9)
    scene.scaler.scale_deployments()
    assert (scene.count, scene.lacking) == (3, [1])
    assert (scene.scale.desired, scene.scale.waits) == (4, "no GPU is free")
    assert scene.scale.reason.startswith("scaled up to 3: ")
    scene.scaler.scale_deployments()
    assert scene.lacking == [1, 0], "one is coming: more may not be needed"
    assert scene.scale.desired == 3


def test_no_change_is_noted_where_nothing_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.free = 0
    scene.wait(9)
    scene.scaler.scale_deployments()
    scene.scaler.scale_deployments()
    assert (scene.count, scene.told, scene.lacking) == (1, [], [1])
    assert scene.scale == ScaleStatus(1, 4, 2, "", 0.0, "no GPU is free")


def test_memory_that_another_model_waits_for_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.elsewhere = {"cpu": "b"}
    scene.wait(9)
    scene.scaler.scale_deployments()
    assert scene.count == 1
    assert scene.scale.waits == "another model waits for memory"


# ---------------------------------------------------------------- down


def test_a_replica_that_did_not_start_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.wait(1)
    scene.scaler.scale_deployments()
    scene.made_up.living[1].state, scene.made_up.living[1].reason = "failed", "no such weights"
    scene.scaler.scale_deployments()
    assert [one.name for one in scene.made_up.living] == ["a/0"]
    assert scene.scale.reason == "scaled down to 1: it did not come up: no such weights"
    assert scene.told[-1][1] == {"model": "a", "replicas": 1, "drained": "a/1", "running": 0}
    scene.scaler.scale_deployments()
    assert scene.count == 1 and scene.scale.waits == "the last did not come up"


def test_one_that_serves_and_fails_later_was_not_stillborn(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.wait(1)
    scene.scaler.scale_deployments()
    scene.made_up.living[1].state = "ready"
    scene.wait(0, oldest_s=0.0)
    scene.scaler.scale_deployments()
    scene.made_up.living[1].state = "failed"
    scene.scaler.scale_deployments()
    assert scene.count == 2


@pytest.mark.parametrize(
    ("load", "at", "left"),
    [
        ("on_demand", "GPU-0", ["a/1"]),
        ("on_demand", "GPU-9", ["a/0", "a/1"]),
        ("on_start", "GPU-0", ["a/0", "a/1"]),
    ],
)
def test_an_on_demand_model_gives_up_the_replica_on_the_contested_gpu(
    monkeypatch: pytest.MonkeyPatch, load: str, at: str, left: list[str]
) -> None:
    scene = Scene(monkeypatch, load=load)
    scene.made_up.living[0].place = Assignment("a", 0, (GPU,), 1)
    scene.made_up.living[0].says(running=9)
    scene.made_up.grow((), StartReason.from_supervisor_start()).state = "ready"
    scene.elsewhere = {at: "b"}
    scene.scaler.scale_deployments()
    assert [one.name for one in scene.made_up.living] == left
    if len(left) == 1:
        assert scene.scale.reason == "scaled down to 1: b waits for its memory"


def test_a_model_on_the_cpu_gives_up_a_replica_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, load="on_demand")
    scene.made_up.grow((), StartReason.from_supervisor_start()).state = "ready"
    scene.elsewhere = {"cpu": "b"}
    scene.scaler.scale_deployments()
    assert [one.name for one in scene.made_up.living] == ["a/0"], "the latest goes"


def test_one_replica_at_a_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, load="on_demand")
    for replica in [*scene.made_up.living, *(scene.made_up.grow((GPU,), NOW) for _ in range(3))]:
        replica.place, replica.state = Assignment("a", replica.place.index, (GPU,), 1), "ready"
    scene.elsewhere = {GPU.uuid: "b"}
    scene.scaler.scale_deployments()
    scene.scaler.scale_deployments()
    assert scene.count == 3, "b may have enough once it has drained"
    scene.made_up.replicas = scene.made_up.living
    scene.scaler.scale_deployments()
    assert scene.count == 2


def lost(*replicas: Replica) -> str:
    return least_to_lose([cast(WorkerProcess, one) for one in replicas]).name


def test_the_replica_that_goes_costs_least() -> None:
    def replica(index: int, state: str = "ready", **figures: Any) -> Replica:
        return Replica(Assignment("a", index, (), 1), state).says(**figures)

    assert lost(replica(0), replica(1, "loading", running=9)) == "a/1"
    assert lost(replica(0, running=2), replica(1, running=1, waiting=2)) == "a/0"
    assert lost(replica(0, kv_used=0.3), replica(1, kv_used=0.5)) == "a/0"
    assert lost(replica(0, kv_used=0.31, served=1), replica(1, kv_used=0.3, served=2)) == "a/0"
    assert lost(replica(0), replica(1)) == "a/1"


# ---------------------------------------------------------------- when


@pytest.mark.parametrize("why", ["unloaded", "a reload changes it", "the end"])
def test_nothing_is_decided_meanwhile(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    scene = Scene(monkeypatch)
    scene.wait(9)
    scene.made_up.wanted = why != "unloaded"
    scene.made_up.changing = why == "a reload changes it"
    scene.deployments.halted = why == "the end"
    scene.scaler.scale_deployments()
    assert scene.count == 1
    assert scene.scale == ScaleStatus(1, 4, 1), "its bounds are shown all the same"


def test_a_status_is_published_on_changes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.scaler.scale_deployments()
    scene.scaler.scale_deployments()
    assert scene.made_up.published == 1


def test_a_model_whose_range_is_taken_away_is_scaled_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(monkeypatch)
    scene.wait(9)
    scene.scaler.scale_deployments()
    scene.made_up.living[1].state = "ready"
    reloaded(scene, replicas=2)
    scene.scaler.scale_deployments()
    assert scene.made_up.scale is None and scene.count == 2
    reloaded(scene, replicas={"min": 1, "max": 4})
    scene.wait(0)
    scene.scaler.scale_deployments()
    assert scene.scale == ScaleStatus(1, 4, 2), "what was before is forgotten"
