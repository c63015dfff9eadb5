"""How what is decided is carried out, and what operators are answered: with made-up deployments."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.protocol.messages import Accepted, Refused
from servekit.protocol.residency import KeepAlive, ModelDemand, ResidencyStatus, SetResidency, Want
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.gateway_process import Gateway
from servekit.supervisor.model_swap import manager
from servekit.supervisor.model_swap.manager import SwapManager
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.system import cgroup
from tests.unit.supervisor.made_up_deployment import GIB, MadeUp, Replica, config, info


class Stage:
    """Models on the CPU of a machine with 100 GiB; one gateway, that tells what is in use."""

    def __init__(self, *deployments: MadeUp) -> None:
        self.deployments = deployments
        self.uses: dict[str, tuple[ModelDemand, float]] = {}
        self.gateway = SimpleNamespace(
            uses=self.uses, on_use=None, state="ready", awaited_models=lambda: {*self.uses}
        )
        plan = SimpleNamespace(config=SimpleNamespace(gpus=SimpleNamespace(reserve=None)))
        made: Any = SimpleNamespace(
            plan=plan,
            served=list(deployments),
            all_deployments=lambda: list(deployments),
            pool=SimpleNamespace(gate=SimpleNamespace(ledger=GpuReservations(()))),
            gpus=(),
        )
        self.residents = SwapManager(cast(DeploymentManager, made), [cast(Gateway, self.gateway)])
        self.residents.update()

    def ask_for(self, model: str, waiting: int = 1, running: int = 0) -> None:
        at = asyncio.get_running_loop().time()
        self.uses[model] = ModelDemand(model, waiting, running), at
        self.gateway.on_use(None)

    def keep(self, model: str, stay_s: float | None, *, loads: bool = False) -> None:
        self.gateway.on_use(KeepAlive(model, stay_s, loads))

    def told(self, deployment: MadeUp) -> ResidencyStatus:
        found = self.residents.residence(deployment.real)
        assert found is not None
        return found

    async def until(self, deployment: MadeUp, tier: str) -> ResidencyStatus:
        async with asyncio.timeout(10):
            while self.told(deployment).tier != tier:
                self.residents.update()
                await asyncio.sleep(0.01)
        return self.told(deployment)

    async def reside(self, model: str, want: Want, *, wait: bool = True) -> Accepted | Refused:
        async with asyncio.timeout(10):
            asking = asyncio.create_task(self.residents.reside(SetResidency(model, want, wait)))
            while not asking.done():
                self.residents.update()
                await asyncio.sleep(0.01)
            return await asking


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def until_told(gateways: object) -> None:
        """They are at once."""

    monkeypatch.setattr(manager, "until_told", until_told)
    monkeypatch.setattr(cgroup, "total_memory_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: 100 * GIB)


def deployment(name: str, *states: str, sleeps: bool = True, **keys: Any) -> MadeUp:
    model = config(name=name, **{"memory": "60GiB", **keys})
    found = MadeUp(model, info=info(sleeps=sleeps))
    found.have(*states)
    return found


async def test_a_request_has_its_model_loaded_and_another_evicted_for_it() -> None:
    a, b = deployment("a", "ready"), deployment("b")
    stage = Stage(a, b)
    stage.ask_for("b")
    assert b.told == [], "there is no room yet"
    told = await stage.until(a, "stopped")
    assert re.fullmatch(
        r"stopped at [\d:]+: evicted for b, 60.0 GiB needed, 40.0 GiB free", told.reason
    )
    await stage.until(b, "coming")
    assert (a.told, b.told) == (["unload"], ["load"])


async def test_a_replica_that_drains_holds_its_memory_and_will_be_free() -> None:
    """The scaler gave it up for the model that waits."""
    a, b = deployment("a", "ready", "ready", memory="40GiB"), deployment("b")
    a.planned = ((),)
    stage = Stage(a, b)
    stage.ask_for("b")
    stage.residents.update()
    assert (a.told, b.told) == ([], []), "no other has to go, and none may load yet"
    assert (
        stage.told(b).reason
        == "60.0 GiB needed, 20.0 GiB free; it waits for a model that is unloading"
    )
    a.replicas.pop()
    stage.residents.update()
    assert (a.told, b.told) == ([], ["load"])


async def test_what_gateways_told_before_a_model_went_does_not_bring_it_back() -> None:
    a = deployment("a", "ready")
    stage = Stage(a)
    stage.ask_for("a", waiting=1)
    a.have()
    stage.residents.update()
    assert (stage.told(a).tier, a.told) == ("stopped", [])
    stage.ask_for("a")
    assert a.told == ["load"]


async def test_it_sleeps_where_it_can_and_is_woken_by_a_request() -> None:
    a = deployment("a", "ready", "ready", idle_sleep_s=600.0, memory="10GiB")
    stage = Stage(a)
    assert await stage.reside("a", "sleep") == Accepted("a is asleep")
    assert [replica.state for replica in a.replicas] == ["asleep", "asleep"]
    assert await stage.reside("a", "sleep") == Accepted("a is already asleep")
    assert stage.told(a).reason.endswith("by an operator")
    stage.ask_for("a")
    await stage.until(a, "resident")
    assert a.told == []


async def test_where_one_worker_cannot_sleep_its_model_is_stopped() -> None:
    a = deployment("a", "ready", "ready", idle_sleep_s=600.0, memory="10GiB")
    a.replicas[1].refuses = "it is not tired"
    stage = Stage(a)
    answer = await stage.reside("a", "sleep")
    assert answer == Refused("a cannot be asleep: it is not tired")
    assert a.told == ["unload"], "half asleep it serves nobody well"
    assert "it could not be put to sleep: it is not tired" in stage.told(a).reason


async def test_where_none_can_sleep_it_serves_on() -> None:
    a = deployment("a", "ready", idle_sleep_s=600.0, memory="10GiB")
    a.replicas[0].refuses = "it is not tired"
    stage = Stage(a)
    assert await stage.reside("a", "sleep") == Refused("a cannot be asleep: it is not tired")
    assert (a.told, stage.told(a).tier) == ([], "resident")


async def test_one_that_cannot_be_woken_is_stopped_and_loaded_anew() -> None:
    a = deployment("a", "ready", idle_sleep_s=600.0, memory="10GiB")
    stage = Stage(a)
    assert await stage.reside("a", "sleep") == Accepted("a is asleep")
    a.replicas[0].refuses = "it sleeps too well"
    stage.ask_for("a")
    told = await stage.until(a, "stopped")
    assert told.reason.endswith("it could not be woken: it sleeps too well")
    stage.ask_for("a")
    assert a.told == ["unload", "load"]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("killed by SIGKILL", "a worker did not stay asleep: killed by SIGKILL"),
        ("", "a worker has come up beside those that sleep"),
    ],
)
async def test_all_of_a_model_sleep_or_none(reason: str, said: str) -> None:
    a = deployment("a", "ready", "ready", idle_sleep_s=600.0, memory="10GiB")
    stage = Stage(a)
    assert await stage.reside("a", "sleep") == Accepted("a is asleep")
    a.replicas[0].state, a.replicas[0].reason = "ready", reason
    assert (await stage.until(a, "stopped")).reason.endswith(said)


async def test_workers_that_a_restart_replaces_leave_their_model_loaded() -> None:
    a = deployment("a", "ready", idle_sleep_s=600.0, memory="10GiB")
    stage = Stage(a)
    assert await stage.reside("a", "sleep") == Accepted("a is asleep")
    a.replicas.append(Replica("a/1", "starting"))
    a.changing = True
    await stage.until(a, "coming")
    del a.replicas[0]
    a.changing = False
    a.replicas[0].state = "ready"
    await stage.until(a, "resident")
    assert a.told == []


async def test_one_that_a_change_leaves_asleep_beside_others_does_not_sleep_on() -> None:
    a = deployment("a", "ready", idle_sleep_s=600.0, memory="10GiB")
    stage = Stage(a)
    assert await stage.reside("a", "sleep") == Accepted("a is asleep")
    a.replicas.append(Replica("a/1", "starting"))  # and a third waits for memory
    a.changing = True
    await stage.until(a, "coming")
    a.replicas[1].state = "ready"
    await stage.until(a, "resident")
    a.changing = False
    told = await stage.until(a, "stopped")
    assert told.reason.endswith("a worker has come up beside those that sleep")


async def test_for_who_waits_the_others_are_woken_instead() -> None:
    a = deployment("a", "ready", "ready", idle_sleep_s=600.0, memory="10GiB")
    stage = Stage(a)
    assert await stage.reside("a", "sleep") == Accepted("a is asleep")
    a.replicas[0].state = "ready"
    stage.ask_for("a", waiting=1)
    await stage.until(a, "coming")
    await stage.until(a, "resident")
    assert [replica.state for replica in a.replicas] == ["ready", "ready"]
    assert a.told == []


# ---------------------------------------------------------------- what operators are answered


async def test_what_cannot_be_is_refused_with_the_reason_and_does_not_come_later() -> None:
    a, b = deployment("a", "ready", load="on_start"), deployment("b")
    stage = Stage(a, b)
    for wait in (True, False):
        answer = await stage.reside("b", "load", wait=wait)
        said = "b cannot be loaded: 60.0 GiB needed, 40.0 GiB free, and the others stay"
        assert answer == Refused(said)
    a.have()
    stage.residents.update()
    assert b.told == ["try again", "try again"]


async def test_a_load_that_fails_is_told_with_its_reason() -> None:
    a = deployment("a")
    stage = Stage(a)
    loading = asyncio.create_task(stage.reside("a", "load"))
    await stage.until(a, "coming")
    a.replicas[0].state, a.replicas[0].reason = "failed", "no such weights"
    assert await loading == Refused("a cannot be loaded: no such weights")


async def test_a_sleep_that_comes_to_nothing_is_told() -> None:
    a = deployment("a", "ready", idle_sleep_s=600.0)
    stage = Stage(a)
    sleeping = asyncio.create_task(stage.reside("a", "sleep"))
    await asyncio.sleep(0)
    a.have("failed")
    answer = await sleeping
    assert isinstance(answer, Refused)
    assert answer.message.startswith("a cannot be asleep: a is failed; only a model that is loaded")


async def test_who_waits_is_told_that_another_operator_wants_something_else() -> None:
    a = deployment("a")
    stage = Stage(a)
    loading = asyncio.create_task(stage.reside("a", "load"))
    await stage.until(a, "coming")
    assert await stage.reside("a", "unload") == Accepted("a is stopped")
    said = "something else was asked for meanwhile, and it is stopped"
    assert await loading == Refused(f"a cannot be loaded: {said}")


async def test_who_waits_is_told_that_a_profile_is_without_it() -> None:
    a = deployment("a")
    stage = Stage(a)
    loading = asyncio.create_task(stage.reside("a", "load"))
    await stage.until(a, "coming")
    a.left_out = "evening"
    answer = await loading
    assert isinstance(answer, Refused) and "something else was asked for" in answer.message


async def test_what_was_to_be_loaded_is_not_once_a_profile_is_without_it() -> None:
    a, b = deployment("a"), deployment("b", "ready")
    stage = Stage(a, b)
    stage.ask_for("b", waiting=0, running=1)
    assert isinstance(await stage.reside("a", "load", wait=False), Accepted)
    a.left_out = "evening"
    stage.residents.update()
    b.have()
    stage.residents.update()
    assert a.told == ["try again"], "it would be unloaded at once, and loaded again"


async def test_two_operators_may_want_the_same() -> None:
    a = deployment("a")
    stage = Stage(a)
    loading = [asyncio.create_task(stage.reside("a", "load")) for _ in range(2)]
    await stage.until(a, "coming")
    a.have("ready")
    assert await asyncio.gather(*loading) == [Accepted("a is loaded")] * 2


async def test_without_waiting_it_is_told_what_has_begun() -> None:
    a = deployment("a")
    stage = Stage(a)
    assert await stage.reside("a", "load", wait=False) == Accepted("a is stopped")
    assert a.told == ["try again", "load"]
    assert await stage.reside("nobody", "load") == Refused(
        "no model is called 'nobody'; there are: a", True
    )


async def test_at_the_end_nothing_is_begun() -> None:
    a = deployment("a")
    stage = Stage(a)
    stage.residents.stop_changes()
    stage.ask_for("a")
    assert a.told == []
    assert await stage.reside("a", "load") == Refused("servekit is shutting down")
    assert (stage.told(a).tier, stage.told(a).reason) == ("failed", "servekit is shutting down")


async def test_clients_move_only_what_comes_by_need() -> None:
    a, b = deployment("a", memory="10GiB"), deployment("b", memory="10GiB", load="manual")
    stage = Stage(a, b)
    for name in "ab":
        stage.keep(name, 5.0, loads=True)
    assert (a.told, b.told) == (["load"], [])
    assert (stage.told(a).stays_s, stage.told(b).stays_s) == (5.0, None)


async def test_of_what_is_there_from_start_to_end_nothing_is_told() -> None:
    a = deployment("a", "ready", load="on_start")
    assert Stage(a).residents.residence(a.real) is None


async def test_what_is_so_already_is_told_so() -> None:
    a = deployment("a", "ready")
    stage = Stage(a)
    assert await stage.reside("a", "load") == Accepted("a is already loaded")
    assert await stage.reside("a", "wake") == Accepted("a is already awake")
    assert await stage.reside("a", "unload") == Accepted("a is stopped")
    assert await stage.reside("a", "unload") == Accepted("a is already stopped")
