"""Reloads of a real file, over workers that no task runs."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from servekit.protocol.messages import Accepted, Refused
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.deployments.plan import Source
from servekit.supervisor.event_log import journal
from servekit.supervisor.workers.fork_server import ForkServer
from servekit.supervisor.workers.worker_process import WorkerProcess
from tests.unit.supervisor.lifecycle.test_managed_process import Host

Models = Sequence[dict[str, Any]]


def echo(name: str, **keys: object) -> dict[str, Any]:
    return {"name": name, "path": name, "engine": "echo", **keys}


class Scene:
    """A manager, its file, and what it has started and told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "servekit.yaml"
        self.host = Host(folder / "run")
        self.published = 0
        self.started: list[WorkerProcess | ForkServer] = []
        self.told: list[str] = []
        monkeypatch.setattr(self.host, "publish_change", self._publish)
        monkeypatch.setattr(journal, "record_event", lambda kind, text, **_: self.told.append(text))

    def _publish(self) -> None:
        self.published += 1

    def write(self, models: Models, **server: object) -> None:
        """Write the file, as if a while ago: nobody waits for its end."""
        self.path.write_text(json.dumps({"models": list(models), "server": {"port": 0, **server}}))
        at = time.time() - 60
        os.utime(self.path, (at, at))

    async def begin(self, *models: dict[str, Any]) -> DeploymentManager:
        self.write(models)
        source = Source(self.path, environ=dict(os.environ))
        manager = DeploymentManager(source.plan(()), self.host, self.started.append)
        manager.apply_plan(manager.plan)
        await settle()
        return manager


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def names(manager: DeploymentManager) -> list[str]:
    return [replica.name for replica in manager.replicas()]


async def test_the_first_plan_starts_all_models_and_says_so(scene: Scene) -> None:
    manager = await scene.begin(echo("a", replicas=2), echo("b"))
    assert names(manager) == ["a/0", "a/1", "b/0"]
    assert scene.started == manager.replicas()
    assert all(one.occasion.cause == "up" for one in manager.served)
    assert scene.published > 0
    assert manager.gpus == ()


async def test_a_reload_starts_and_drains_what_changed_and_nothing_else(scene: Scene) -> None:
    manager = await scene.begin(echo("a"), echo("b"))
    (a, b), before = manager.replicas(), scene.published
    scene.write([echo("a"), echo("c")])
    assert await manager.reload_config() == Accepted(
        "a unchanged, c added with 1 replica, b removed"
    )
    await settle()
    assert [one.model.name for one in manager.served] == ["a", "c"]
    assert [one.model.name for one in manager.all_deployments()] == ["a", "c", "b"]
    assert (a.ending, b.ending) == (False, True)
    assert scene.started[2:] == [manager.served[1].replicas[0]]
    assert manager.served[1].occasion.cause == "reload"
    assert manager.served[0].occasion.cause == "up", "its workers are those of the start"
    assert [model.name for model in manager.plan.config.models] == ["a", "c"]
    assert scene.told == ["a unchanged, c added with 1 replica, b removed"]
    assert scene.published > before
    manager.forget_process(b)
    assert [one.model.name for one in manager.all_deployments()] == ["a", "c"]


async def test_a_removed_model_is_known_until_its_last_worker_ended(scene: Scene) -> None:
    manager = await scene.begin(echo("a"), echo("b", replicas=2))
    scene.write([echo("a")])
    await manager.reload_config()
    _, first, second = manager.replicas()
    manager.forget_process(first)
    assert names(manager) == ["a/0", "b/1"]
    manager.forget_process(second)
    assert names(manager) == ["a/0"]


async def test_a_removed_model_that_is_not_loaded_is_forgotten_at_once(scene: Scene) -> None:
    manager = await scene.begin(echo("a"), echo("b", load="on_demand"))
    scene.write([echo("a")])
    await manager.reload_config()
    assert [one.model.name for one in manager.all_deployments()] == ["a"]


@pytest.mark.parametrize(
    ("write", "said", "invalid"),
    [
        (lambda scene: scene.write([]), "models", True),
        (lambda scene: scene.write([echo("a")], max_body_bytes=4096), "needs a restart", True),
        (lambda scene: scene.path.unlink(), "there is no such file", True),
    ],
    ids=["it is invalid", "it needs a restart", "it is gone"],
)
async def test_a_refused_reload_changes_nothing(
    scene: Scene, write: Callable[[Scene], None], said: str, invalid: bool
) -> None:
    manager = await scene.begin(echo("a"))
    plan, replicas = manager.plan, manager.replicas()
    write(scene)
    answer = await manager.reload_config()
    assert isinstance(answer, Refused)
    assert said in answer.message and answer.invalid is invalid
    assert manager.plan is plan and manager.replicas() == replicas
    assert scene.told == [f"refused: {answer.message}"]


async def test_a_bug_breaks_off_a_reload_and_ends_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await scene.begin(echo("a"))
    monkeypatch.setattr(Source, "plan", lambda *_: 1 / 0)
    answer = await manager.reload_config()
    assert isinstance(answer, Refused)
    assert answer.message.startswith("the reload failed: ZeroDivisionError")
    assert scene.told == ["failed: ZeroDivisionError('division by zero')"]


async def test_nothing_is_reloaded_once_it_ends(scene: Scene) -> None:
    manager = await scene.begin(echo("a"))
    manager.stop_changes()
    answer = await manager.reload_config()
    assert isinstance(answer, Refused)
    assert answer.message == "servekit is shutting down; there is nothing to reload"
    assert not answer.invalid


async def test_an_end_that_comes_while_the_file_is_read_stops_the_reload(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await scene.begin(echo("a"))
    scene.write([echo("b")])
    monkeypatch.setattr(Source, "await_rest", lambda self: setattr(manager, "halted", True))
    assert isinstance(await manager.reload_config(), Refused)
    assert names(manager) == ["a/0"]


async def test_of_two_reloads_the_second_waits_for_the_first(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await scene.begin(echo("a"))
    running: list[int] = [0]
    most: list[int] = []

    async def read(profile: str | None) -> str:
        running[0] += 1
        most.append(running[0])
        await settle()
        running[0] -= 1
        return ""

    monkeypatch.setattr(manager, "_reload", read)
    await asyncio.gather(manager.reload_config(), manager.reload_config())
    assert most == [1, 1]


async def test_an_unchanged_model_retries_its_failed_workers(scene: Scene) -> None:
    manager = await scene.begin(echo("a"))
    (worker,) = manager.replicas()
    retried: list[bool] = []
    worker.retry = lambda: retried.append(True)  # type: ignore[method-assign]
    assert await manager.reload_config() == Accepted("nothing to change")
    assert retried == [True]


@pytest.mark.parametrize("replicas", [1, {"min": 1, "max": 3}])
async def test_a_model_that_changes_is_unchanged_to_the_next_reload(
    scene: Scene, replicas: int | dict[str, int]
) -> None:
    manager = await scene.begin(echo("a", replicas=replicas))
    [old] = manager.replicas()
    old.change_state("serve")
    scene.write([echo("a", replicas=replicas, options={"step_s": 0.1})])
    assert await manager.reload_config() == Accepted("1 replica of a replaced")
    await settle()
    assert await manager.reload_config() == Accepted("nothing to change")
    await settle()
    _, new = manager.replicas()
    assert (old.ending, new.ending) == (False, False)
    new.change_state("serve")
    await settle()
    assert (old.ending, new.ending) == (True, False)


async def test_new_keys_reach_the_workers_that_go_on(scene: Scene) -> None:
    manager = await scene.begin(echo("a", timeout_s=5.0))
    (worker,) = manager.replicas()
    scene.write([echo("a", timeout_s=9.0)])
    assert await manager.reload_config() == Accepted("a updated")
    assert manager.replicas() == [worker] and worker.model.timeout_s == 9.0


# ---------------------------------------------------------------- a start in vain


async def test_a_start_is_in_vain_once_all_workers_gave_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await scene.begin(echo("a"), echo("b"))
    first, second = manager.replicas()
    gave_up: set[WorkerProcess] = set()
    monkeypatch.setattr(WorkerProcess, "gave_up", property(lambda one: one in gave_up))
    first.reason = second.reason = "no such weights"
    assert manager.in_vain() == ""
    gave_up.add(first)
    assert manager.in_vain() == ""
    gave_up.add(second)
    assert manager.in_vain() == ("no model can be served. a: no such weights b: no such weights")
    first.change_state("serve")
    assert manager.in_vain() == ""
    first.change_state("stop")
    assert manager.in_vain() == "", "it has served once"


async def test_a_model_on_demand_may_serve_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerProcess, "gave_up", property(lambda one: True))
    manager = await scene.begin(echo("a"), echo("b", load="on_demand"))
    assert names(manager) == ["a/0"]
    assert manager.in_vain() == ""


async def test_a_model_that_the_profile_leaves_out_will_not(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerProcess, "gave_up", property(lambda one: True))
    models = [echo("a"), echo("b")]
    scene.path.write_text(json.dumps({"models": models, "profiles": {"one": ["a"]}}))
    source = Source(scene.path, environ=dict(os.environ), profile="one")
    manager = DeploymentManager(source.plan(()), scene.host, scene.started.append)
    manager.apply_plan(manager.plan)
    await settle()
    assert names(manager) == ["a/0"]
    assert manager.in_vain().startswith("no model can be served")


# ---------------------------------------------------------------- restarts


async def test_a_model_is_restarted_by_any_of_its_names_and_a_worker_by_its_own(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await scene.begin(echo("a", aliases=["other"], replicas=2), echo("b"))
    meant: list[list[str]] = []
    for one in manager.served:
        monkeypatch.setattr(one, "restart", lambda some: meant.append([r.name for r in some]))
    for name in ("a", "other", "a/1", "b/0"):
        answer = await manager.restart_model(name, wait=False)
        assert answer == Accepted(f"{name} is restarting")
    assert meant == [["a/0", "a/1"], ["a/0", "a/1"], ["a/1"], ["b/0"]]
    assert scene.told == [f"restart of {name}" for name in ("a", "other", "a/1", "b/0")]


async def test_a_name_that_nobody_has_is_told_with_the_nearest(scene: Scene) -> None:
    manager = await scene.begin(echo("qwen", replicas=2))
    answer = await manager.restart_model("qwen/2", wait=False)
    assert answer == Refused(
        "no model or worker is called 'qwen/2'; there are: qwen, qwen/0, qwen/1; did you mean"
        " 'qwen/1'?",
        True,
    )


async def test_what_is_not_loaded_changes_already_or_ends_is_not_restarted(scene: Scene) -> None:
    manager = await scene.begin(echo("a"), echo("b", load="on_demand"))
    answer = await manager.restart_model("b", wait=False)
    assert answer == Refused("b is not loaded; `servekit load b` loads it")
    assert await manager.restart_model("a", wait=False) == Accepted("a is restarting")
    answer = await manager.restart_model("a/0", wait=False)
    assert answer == Refused("a is changing already; try again when it is done")
    await settle()
    answer = await manager.restart_model("a/0", wait=False)  # which is draining now
    assert isinstance(answer, Refused)
    assert "there are: a, b, a/1; did you mean" in answer.message, "it is none that there is"
    manager.stop_changes()
    answer = await manager.restart_model("a", wait=False)
    assert answer == Refused("servekit is shutting down")
    assert scene.told == ["restart of a"]


@pytest.mark.parametrize(
    ("why", "told"),
    [
        ("", Accepted("a is restarted")),
        ("no file there", Refused("a could not be restarted: no file there")),
    ],
)
async def test_who_waits_is_told_how_a_restart_has_gone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, why: str, told: Accepted | Refused
) -> None:
    manager = await scene.begin(echo("a"))

    async def until_settled() -> str:
        return why

    monkeypatch.setattr(manager.served[0], "restart", lambda replicas: None)
    monkeypatch.setattr(manager.served[0], "until_settled", until_settled)
    assert await manager.restart_model("a", wait=True) == told


# ---------------------------------------------------------------- the rest


async def test_a_quarantine_resets_the_breaker_of_its_model_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await scene.begin(echo("a"), echo("b"))
    reset: list[str] = []
    for one in manager.served:
        name = one.model.name
        monkeypatch.setattr(one.circuit, "reset", lambda name=name: reset.append(name))
    manager.reset_breaker("b")
    assert reset == ["b"]


async def test_a_tick_starts_the_fork_servers_that_lacked_memory(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await scene.begin(echo("a"), echo("b"))
    tended: list[str] = []
    for one in manager.served:
        name = one.model.name
        monkeypatch.setattr(one, "tend_fork_servers", lambda name=name: tended.append(name))
    manager.start_missing_fork_servers()
    assert tended == []
    manager.served[1].fork_servers.lacks_memory = True
    manager.start_missing_fork_servers()
    assert tended == ["b"]


async def test_the_end_halts_every_deployment_and_closes_its_fork_servers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = await scene.begin(echo("a"), echo("b"))
    halted: list[str] = []
    for one in manager.served:
        name = one.model.name
        monkeypatch.setattr(one, "stop_changes", lambda name=name: halted.append(name))
        monkeypatch.setattr(
            one.fork_servers, "close", lambda name=name: halted.append(f"forks of {name}")
        )
    manager.stop_changes()
    assert halted == ["a", "forks of a", "b", "forks of b"]
