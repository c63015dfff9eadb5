"""Which standbys there are to be, as a model's workers come up and its file changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from servekit.config.schema import ModelConfig
from servekit.protocol.messages import Quarantined, WorkerState
from servekit.supervisor.process.run_dir import RunDir
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers import fork_server
from servekit.supervisor.workers.fork_server import ForkServer, ForkServerPool
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system import cgroup
from servekit.system.gpu.gpus import Gpu, Slot

GPUS = tuple(Gpu(index, f"GPU-{index}", "H200", 10, 10) for index in range(2))


class Host:
    launcher = None

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir.claim(path)
        self.mark = "of-a-unit-test"
        self.environ: Mapping[str, str] = {"PATH": os.environ["PATH"]}

    def keys_of(self, model: ModelConfig) -> Mapping[str, str]:
        return {}

    def publish_change(self) -> None: ...
    def publish_later(self) -> None: ...

    def children_changed(self) -> None: ...
    def on_line(self, name: str, text: str) -> None: ...
    def is_unused(self, adapter: str) -> bool:
        return True

    def quarantine(self, request: Quarantined) -> None: ...


@dataclass
class Worker:
    model: ModelConfig
    place: Assignment
    state: WorkerState = "ready"


def model(**settings: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "a", "engine": "echo", "path": "a", **settings})


def workers(of: ModelConfig, *slots: Slot) -> list[WorkerProcess]:
    some = [Worker(of, Assignment("a", n, slot, None)) for n, slot in enumerate(slots)]
    return cast(list[WorkerProcess], some)


@pytest.fixture
async def made(tmp_path: Path) -> tuple[ForkServerPool, list[ForkServer]]:
    run: list[ForkServer] = []
    return ForkServerPool(Host(tmp_path / "run"), run.append), run


def names(standbys: list[ForkServer]) -> list[str]:
    return [standby.name for standby in standbys]


Made = tuple[ForkServerPool, list[ForkServer]]


async def test_one_for_each_environment_once_all_workers_have_come_up(made: Made) -> None:
    brood, run = made
    wanted = model(standby=True)
    some = workers(wanted, (), (), *zip(GPUS), GPUS)
    some[0].state = "loading"
    brood.converge(wanted, some)
    assert not run
    some[0].state = "ready"
    some[3].state = "failed"
    brood.converge(wanted, some)
    brood.converge(wanted, some)
    assert names(run) == ["a/standby", "a/standby-0", "a/standby-0-1"]
    some[2].state = "backoff"  # what it is there for
    brood.converge(wanted, some)
    assert not any(standby.ending for standby in run)


@pytest.mark.parametrize(
    ("wish", "engine", "available_bytes", "count"),
    [
        ("auto", "echo", 2**40, 0),
        ("auto", "transformers", 2**40, 1),
        ("auto", "transformers", fork_server.ROOM_BYTES - 1, 0),
        (True, "transformers", 0, 1),
        (True, "echo", 0, 1),
        (False, "transformers", 2**40, 0),
    ],
)
async def test_who_wants_one(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    wish: bool | str,
    engine: str,
    available_bytes: int,
    count: int,
) -> None:
    monkeypatch.setattr(cgroup, "available_memory_bytes", lambda: available_bytes)
    brood, run = made
    wanted = model(standby=wish, engine=engine)
    brood.converge(wanted, workers(wanted, ()))
    assert len(run) == count
    assert brood.lacks_memory is (0 < available_bytes < fork_server.ROOM_BYTES)


async def test_another_version_has_others(made: Made) -> None:
    brood, run = made
    old, new = model(standby=True), model(standby=True, dtype="float16")
    brood.converge(old, workers(old, ()))
    same = model(standby=True, timeout_s=5.0)
    brood.converge(same, workers(old, ()))
    assert [standby.ending for standby in run] == [False]
    brood.converge(new, workers(old, ()))
    assert [standby.ending for standby in run] == [True]
    brood.converge(new, [*workers(old, ()), *workers(new, ())])
    assert [standby.ending for standby in run] == [True, False]
    assert brood.standbys == run
    brood.forget_fork_server(run[0])
    assert brood.standbys == run[1:]


async def test_it_ends_when_it_is_not_wanted_any_more_and_for_good_when_closed(made: Made) -> None:
    brood, run = made
    wanted = model(standby=True)
    brood.converge(wanted, workers(wanted, ()))
    brood.converge(model(standby=False), workers(wanted, ()))
    assert [standby.ending for standby in run] == [True]
    brood.converge(wanted, workers(wanted, ()))
    brood.close()
    brood.converge(wanted, workers(wanted, ()))
    assert [standby.ending for standby in run] == [True, True]


async def test_it_ends_when_its_model_is_unloaded_and_comes_again(made: Made) -> None:
    brood, run = made
    wanted = model(standby=True)
    some = workers(wanted, ())
    brood.converge(wanted, some, away=True)
    assert not run
    brood.converge(wanted, some)
    some[0].state = "asleep"
    brood.converge(wanted, some)
    assert [standby.ending for standby in run] == [False]
    brood.converge(wanted, some, away=True)
    assert [standby.ending for standby in run] == [True]
    brood.converge(wanted, workers(wanted, ()))
    assert [standby.ending for standby in run] == [True, False]


async def test_nothing_is_forked_before_it_is_ready_or_for_another_version(made: Made) -> None:
    brood, run = made
    wanted = model(standby=True)
    place = Assignment("a", 0, (), None)
    assert await brood.fork(wanted, place, {}, "m" * 16, 1, 2) is None
    brood.converge(wanted, workers(wanted, ()))
    assert await brood.fork(wanted, place, {}, "m" * 16, 1, 2) is None
    assert await brood.fork(model(dtype="float16"), place, {}, "m" * 16, 1, 2) is None
    assert run[0].forks == 0
