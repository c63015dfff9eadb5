"""Models that come and go, where they meet the rest: GPUs, the breaker, reloads, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.instance import Instance
from tests.integration.made_up_gpus import MadeUpGpus, on_gpu
from tests.integration.test_residents import complete, health, on_demand, run, text, until_tier

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
