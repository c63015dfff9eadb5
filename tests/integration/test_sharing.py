"""Models that share a GPU: real processes, and an NVML that is made up."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.protocol.control.startup_messages import GATE, Start
from servekit.protocol.messages import ReplicaStatus
from servekit.system import procfs
from tests.integration.instance import PROGRAM, Instance, write_config
from tests.integration.made_up_gpus import GIB, MadeUpGpus, on_gpu
from tests.integration.test_faults_supervisor import cli, complete, rewrite
from tests.integration.test_timings import starts
from tests.unit.engines.harness import write_tiny_llama

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def gpus(tmp_path: Path) -> MadeUpGpus:
    return MadeUpGpus(tmp_path)


def check(file: Path, gpus: MadeUpGpus) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, "check", str(file)]
    env = {**os.environ, **gpus.env}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


@pytest.mark.lane("long")
def test_check_shows_when_models_are_loaded_where_one_comes_and_goes(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    models = [on_gpu("a", "40%", 30), {**on_gpu("b", "40%", 30), "load": "on_demand"}]
    told = [line.split() for line in check(write_config(tmp_path, models), gpus).stdout.split("\n")]
    assert ["WORKER", "LOAD", "ENGINE"] in [words[:3] for words in told]
    assert ["a/0", "on_start", "echo"] in [words[:3] for words in told]
    assert ["b/0", "on_demand", "echo"] in [words[:3] for words in told]
    assert "LOAD" not in check(write_config(tmp_path, models[:1]), gpus).stdout


@pytest.mark.lane("long")
@pytest.mark.parametrize(("device", "each"), [("cpu", ""), ("cuda", " PER GPU")])
def test_check_says_of_what_a_model_takes_its_share(
    tmp_path: Path, gpus: MadeUpGpus, device: str, each: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = {"name": "a", "path": str(write_tiny_llama(folder)), "device": device}
    [head] = [
        line
        for line in check(write_config(tmp_path, [model]), gpus).stdout.split("\n")
        if line.startswith("MODEL")
    ]
    assert re.split(r"  +", head.strip())[-3:] == [f"LEAST{each}", f"CLAIM{each}", "NOTE"]


def ended(start: Start, name: str) -> float:
    """When a phase ended, in seconds since the epoch."""
    [phase] = [one for one in start.phases if one.name == name]
    assert phase.ended_s is not None
    return start.at + phase.ended_s


def progress(instance: Instance, name: str) -> str:
    told = instance.replica(name).progress
    return "" if told is None else told.phase


def test_they_load_one_after_the_other_and_the_second_says_whom_it_waits_for(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    models = [on_gpu("a", "60%", 55, load_s=4), on_gpu("b", "40GiB", 35, load_s=4)]
    waits: set[str] = set()

    def settled() -> bool:
        replicas = [one for model in instance.status().models for one in model.replicas]
        waits.update(one.progress.phase for one in replicas if one.progress)
        health = httpx.get(f"{url}/readyz").json()["models"]
        told = [one["replicas"][0]["progress"] for one in health.values()]
        waits.update(f"readyz: {one['phase']}" for one in told if one)
        return all(one.state == "ready" for one in replicas)

    def at(event: str, name: str) -> int:
        found = re.search(rf"{event}\b.*{name}", re.sub(r"\x1b\[[0-9;]*m", "", instance.log))
        assert found is not None, instance.log
        return found.start()

    with Instance.up(tmp_path, models, env=gpus.env) as instance:
        url = instance.url
        instance.until("both are up", settled, 60)
        first, second = sorted(("a/0", "b/0"), key=functools.partial(at, "worker_ready"))
        assert at("started", second) < at("ready", first)
        (loaded,), (waited,) = starts(instance, first), starts(instance, second)
        assert ended(waited, "import") < ended(loaded, "load") < ended(waited, GATE)
        assert GATE not in [one.name for one in loaded.phases]
        said = f"waits for {first} on GPU 0 (made up)"
        assert {said, f"readyz: {said}"} <= waits
        assert all(complete(url, name).status_code == 200 for name in "ab")
        assert instance.replica("a/0").claim_bytes == 60 * GIB
        assert instance.replica("a/0").gpu_bytes == 55 * GIB
        assert "55.0 GiB of 60.0 GiB" in cli(instance, "ps").stdout


def waiting(instance: Instance, name: str, other: str) -> ReplicaStatus:
    """A worker that has imported its engine and waits for `other`."""
    said = f"waits for {other} on GPU 0 (made up)"

    def probe() -> bool:
        phases = [one.name for start in starts(instance, name)[-1:] for one in start.phases]
        return GATE in phases and progress(instance, name) == said

    instance.until(f"{name} waits for {other}", probe, 60)
    return instance.replica(name)


def sharing(load_s: float) -> list[dict[str, Any]]:
    """A model that loads for so long, and one that shares its GPU."""
    return [on_gpu("a", "60%", 50, load_s=load_s), on_gpu("b", "40GiB", 35)]


@contextlib.contextmanager
def with_one_that_waits(
    folder: Path, gpus: MadeUpGpus, load_s: float, **of_it: Any
) -> Iterator[tuple[Instance, ReplicaStatus]]:
    """An instance whose b/0 waits for the load of a/0."""
    models = sharing(load_s)
    with Instance.up(folder, models[:1], env=gpus.env) as instance:
        instance.until("the first loads", lambda: progress(instance, "a/0") == "load")
        models[1] |= of_it
        rewrite(instance, models)
        assert cli(instance, "reload").returncode == 0
        yield instance, waiting(instance, "b/0", "a/0")


@pytest.mark.lane("long")
def test_one_that_waits_dies_alone_and_waits_again(tmp_path: Path, gpus: MadeUpGpus) -> None:
    with with_one_that_waits(tmp_path, gpus, 15) as (instance, waits):
        assert "waits for a/0 on GPU 0" in cli(instance, "ps").stdout
        assert "waits for a/0 on GPU 0" in cli(instance, "why", "b").stdout
        os.kill(waits.pid, signal.SIGKILL)
        instance.until("it is replaced", lambda: instance.replica("b/0").pid not in (0, waits.pid))
        waiting(instance, "b/0", "a/0")
        instance.until_settled()
        assert (instance.replica("a/0").restarts, instance.replica("b/0").restarts) == (0, 1)
        assert " into gate, " in cli(instance, "why", "b").stdout
        assert all(complete(instance.url, name).status_code == 200 for name in "ab")


@pytest.mark.lane("long")
def test_one_that_waits_is_let_in_by_the_death_of_the_other(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    with with_one_that_waits(tmp_path, gpus, 600) as (instance, waits):
        os.kill(instance.replica("a/0").pid, signal.SIGKILL)
        instance.until("it serves", lambda: instance.replica("b/0").state == "ready")
        assert instance.replica("b/0").pid == waits.pid
        assert complete(instance.url, "b").status_code == 200


@pytest.mark.lane("long")
def test_the_time_limit_of_a_load_does_not_run_while_it_waits(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    with with_one_that_waits(tmp_path, gpus, 12, load_timeout_s=2) as (instance, waits):
        instance.until_settled()
        assert instance.replica("b/0").pid == waits.pid


@pytest.mark.lane("long")
def test_one_that_waits_ends_with_its_model_and_with_the_instance(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    with with_one_that_waits(tmp_path, gpus, 600) as (instance, waits):
        rewrite(instance, sharing(600)[:1])
        assert cli(instance, "reload").returncode == 0
        instance.until("it is gone", lambda: procfs.read_process(waits.pid) is None)
        rewrite(instance, sharing(600))
        assert cli(instance, "reload").returncode == 0
        waiting(instance, "b/0", "a/0")
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0


@pytest.mark.lane("long")
def test_a_plan_that_does_not_fit_is_refused_with_the_arithmetic(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    models = [on_gpu("a", "60%", 0), on_gpu("b", "39GiB", 0)]
    reserve = {"gpus": {"reserve": "2GiB"}}
    done = check(write_config(tmp_path, models, sections=reserve), gpus)
    assert done.returncode == 2
    assert "servekit.yaml:" in done.stderr
    assert "models[1].memory" in done.stderr
    assert (
        "b/0 beside the others: it claims 39.0 GiB of GPU 0 (made up), which has "
        "100.0 GiB, less 2.0 GiB reserved, less 60.0 GiB of a: 1.0 GiB too much"
    ) in done.stderr
    models[1]["memory"] = "38GiB"
    done = check(write_config(tmp_path, models, sections=reserve), gpus)
    assert done.returncode == 0, done.stderr


@pytest.mark.lane("long")
def test_one_that_died_comes_back_when_its_memory_is_gone(tmp_path: Path, gpus: MadeUpGpus) -> None:
    models = [on_gpu("a", "60%", 50), on_gpu("b", "40%", 30)]
    with Instance.up(tmp_path, models, env=gpus.env) as instance:
        instance.until_settled()
        pid = instance.replica("a/0").pid
        gpus.hold({pid: 50})  # as long as the driver takes to free it
        os.kill(pid, signal.SIGKILL)
        instance.until(
            "it waits",
            lambda: "held by a worker of ours that has ended" in progress(instance, "a/0"),
            30,
        )
        assert complete(instance.url, "b").status_code == 200
        gpus.hold({})
        instance.until("it is back", lambda: instance.replica("a/0").state == "ready", 60)


def test_a_strangers_memory_is_waited_for_and_named(tmp_path: Path, gpus: MadeUpGpus) -> None:
    gpus.hold({os.getpid(): 50})
    with Instance.up(tmp_path, [on_gpu("a", "60%", 50)], env=gpus.env) as instance:

        def says() -> str:
            told = progress(instance, "a/0")
            return told if "needed" in told else ""

        told = instance.until("it says so", says)
        assert "GPU 0 (made up) has 50.0 GiB free, where 60.0 GiB are needed: 10.0 GiB" in told
        assert f"pid {os.getpid()} (" in told
        assert instance.replica("a/0").gpu_bytes == 0
        gpus.hold({os.getpid(): 40})
        instance.until("it is up", lambda: instance.replica("a/0").state == "ready", 60)


@pytest.mark.lane("long")
def test_one_that_takes_more_than_its_claim_is_told_of(tmp_path: Path, gpus: MadeUpGpus) -> None:
    with Instance.up(tmp_path, [on_gpu("a", "60%", 70)], env=gpus.env) as instance:
        instance.until("it is seen", lambda: instance.replica("a/0").excess, 60)
        words = "holds 70.0 GiB of GPU 0 (made up), where it claims 60.0 GiB"
        assert instance.replica("a/0").excess == words
        assert words in cli(instance, "ps").stdout
        assert words in " ".join(cli(instance, "why", "a").stdout.split())
        for _ in range(3):
            instance.status()  # reads NVML each time
        assert instance.log.count("gpu_memory_over_claim") == 1


@pytest.mark.lane("long")
def test_a_reload_makes_room_first_where_old_and_new_do_not_fit(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    def file(step_s: float) -> list[dict[str, Any]]:
        return [on_gpu("a", "60%", 50, step_s=step_s), on_gpu("b", "30%", 20)]

    with Instance.up(tmp_path, file(0), env=gpus.env) as instance:
        instance.until_settled()
        before = {name: instance.replica(f"{name}/0").pid for name in "ab"}
        write_config(tmp_path, file(0.001))
        assert cli(instance, "reload").returncode == 0
        instance.until(
            "only the new one is there, and serves",
            lambda: (
                [(r.state, r.pid == before["a"]) for r in instance.model("a").replicas]
                == [("ready", False)]
            ),
            30,
        )
        assert instance.replica("b/0").pid == before["b"]
