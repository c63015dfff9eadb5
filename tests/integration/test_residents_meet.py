"""Models that come and go, where they meet the rest: GPUs, the breaker, reloads, adapters."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.instance import Instance, write_config
from tests.integration.made_up_gpus import MadeUpGpus, on_gpu
from tests.integration.test_residents import (
    complete,
    count,
    health,
    on_demand,
    residence,
    run,
    text,
    until_tier,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def gpus(tmp_path: Path) -> MadeUpGpus:
    return MadeUpGpus(tmp_path)


def on_demand_gpu(name: str, memory: str, held: float, **more: Any) -> dict[str, Any]:
    return {**on_gpu(name, memory, held, **more), "load": "on_demand"}


def test_one_that_could_not_be_loaded_takes_no_room(tmp_path: Path, gpus: MadeUpGpus) -> None:
    broken = on_demand_gpu("a", "60%", 0, load_error="no such weights")
    with Instance.up(tmp_path, [broken, on_demand_gpu("b", "60%", 50)], env=gpus.env) as instance:
        instance.until_settled()
        assert complete(instance.url, "a").status_code == 503
        until_tier(instance, "a", "failed")
        assert text(complete(instance.url, "b")) == "hello"


def test_a_load_that_fails_is_not_the_end_of_the_instance(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [on_demand("a", load_error="no such weights")]) as instance:
        instance.until_settled()
        for _ in range(2):
            answer = complete(instance.url, "a")
            assert answer.status_code == 503
            assert "no such weights" in answer.json()["error"]["message"]
        assert health(instance.url)[1]["a"]["residency"] == "failed"


def test_to_load_what_is_loaded_changes_nothing(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [on_demand("a", idle_unload_s=1.0)]) as instance:
        instance.until_settled()
        assert text(complete(instance.url, "a")) == "hello"
        assert run(instance, "load", "a").returncode == 0
        assert "unused" in until_tier(instance, "a", "stopped").reason


def test_workers_of_a_model_that_is_back_are_not_called_as_those_that_drain(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    """Who has claims and turns on a GPU is known by name."""
    models = [on_gpu("a", "30%", 20, step_s=0.05), on_gpu("b", "30%", 20)]
    with Instance.up(tmp_path, models, env=gpus.env) as instance:
        instance.until_settled()
        url = instance.url

        def workers() -> dict[str, str]:
            status = instance.status()
            return {r.name: r.state for m in status.models if m.name == "a" for r in m.replicas}

        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(complete, url, "a", tokens=100)
            instance.until("it runs", lambda: instance.replica("a/0").running)
            write_config(tmp_path, models[1:])
            assert run(instance, "reload").returncode == 0
            write_config(tmp_path, models)
            assert run(instance, "reload").returncode == 0
            instance.until("both are there", lambda: workers().get("a/1") == "ready")
            assert workers()["a/0"] == "draining"
            assert text(long.result()) == "hello" * 20
        instance.until("the old one is gone", lambda: workers() == {"a/1": "ready"})


def test_what_an_operator_was_refused_does_not_come_later(tmp_path: Path) -> None:
    models = [
        on_demand("a", load="manual"),
        on_demand("b", load="manual"),
        on_demand("c", memory="10%"),
    ]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        assert run(instance, "load", "a").returncode == 0
        refused = run(instance, "load", "b")
        assert (refused.returncode, "and the others stay" in refused.stderr) == (1, True)
        assert run(instance, "unload", "a").returncode == 0
        assert text(complete(instance.url, "c")) == "hello"  # what is to come is begun by then
        assert residence(instance, "b").tier == "stopped"


def test_one_that_dies_while_it_waits_to_wake_is_loaded_anew(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    model = {**on_demand_gpu("a", "6GiB", 1), "idle_sleep_s": 0.3}
    with Instance.up(tmp_path, [model], env=gpus.env) as instance:
        instance.until_settled()
        url = instance.url
        assert text(complete(url, "a")) == "hello"
        until_tier(instance, "a", "asleep")
        gpus.hold({os.getpid(): 96})
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(complete, url, "a")

            def progress() -> bool:
                told = instance.replica("a/0").progress
                return told is not None and "too few" in told.phase

            instance.until("it waits for memory", progress)
            os.kill(instance.replica("a/0").pid, signal.SIGKILL)
            instance.until("that is the end of it", lambda: "its worker died" in instance.log)
            gpus.hold({})
            assert text(waits.result()) == "hello"
        assert count(instance, "loading", "a") == 2
