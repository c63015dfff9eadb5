"""Reloads of a model on a GPU that has no memory for its old and its new version at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.instance import Instance, echo
from tests.integration.made_up_gpus import MadeUpGpus, on_gpu
from tests.integration.test_faults_supervisor import cli
from tests.integration.test_generations import DRAIN_S, completion, lap, reload, workers

pytestmark = pytest.mark.timeout(120)

SERVER = {"drain_timeout_s": DRAIN_S}
STEP_S = 0.02
SHORT, MIDDLE, LONG = 20, 250, 1000  # tokens: 0.4 s, 5 s and 20 s


@pytest.fixture
def gpus(tmp_path: Path) -> MadeUpGpus:
    return MadeUpGpus(tmp_path)


def gpu_model(path: str, gib: int, **options: Any) -> dict[str, Any]:
    return on_gpu("m", f"{gib}GiB", gib, step_s=STEP_S, **options) | {"path": path}


@pytest.mark.lane("long")
def test_the_old_version_has_the_drain_timeout_and_no_longer(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    with (
        ThreadPoolExecutor(4) as pool,
        Instance.up(tmp_path, [gpu_model("old", 60)], server=SERVER, env=gpus.env) as instance,
    ):
        url = instance.until_settled().url
        long = completion(pool, url, LONG, stream=True)
        whole = completion(pool, url, MIDDLE, stream=False)
        assert long.begun.wait(20)
        [old] = workers(instance, "ready")
        short = completion(pool, url, SHORT, stream=True)
        assert short.begun.wait(20)
        began = time.monotonic()
        reload(instance, tmp_path, gpu_model("new", 60))
        assert (short.over.result(20).text, short.error) == (lap(SHORT), {})
        assert long.over.result(30).error["code"] == "model_changed", long.lines[-3:]
        assert lap(LONG).startswith(long.text)
        assert time.monotonic() - began > DRAIN_S
        [new] = instance.until("the new one serves", lambda: workers(instance, "ready"))
        assert new.generation.partition(".")[0] != old.generation.partition(".")[0]
        assert completion(pool, url, SHORT, stream=True).over.result(20).text == lap(SHORT)
        assert (whole.over.result(60).text, whole.error) == (lap(MIDDLE), {}), "it begins anew"
        assert "rollout_cuts_requests" in instance.log


def test_on_the_cpu_a_version_waits_for_the_memory_of_the_one_before(tmp_path: Path) -> None:
    """Two replicas become one that claims as much: both make room first."""
    old = echo("m", replicas=2, step_s=STEP_S) | {"path": "old", "memory": "45%"}
    new = echo("m", step_s=STEP_S) | {"path": "new", "memory": "90%"}
    with (
        ThreadPoolExecutor(2) as pool,
        Instance.up(tmp_path, [old], server=SERVER) as instance,
    ):
        url = instance.until_settled().url
        before = {one.pid for one in workers(instance, "ready")}
        claimed: list[int] = []

        def new_serves() -> bool:
            there = [one for one in instance.model("m").replicas if one.pid]
            claimed.append(sum(45 if one.pid in before else 90 for one in there))
            return any(one.state == "ready" and one.pid not in before for one in there)

        long = completion(pool, url, LONG, stream=True)
        assert long.begun.wait(20)
        whole = completion(pool, url, SHORT, stream=False)
        reload(instance, tmp_path, new)
        instance.until("the new one serves", new_serves)
        assert max(claimed) == 90, "never both"
        assert long.over.result(30).error["code"] == "model_changed", long.lines[-3:]
        assert (whole.over.result(60).text, whole.error) == (lap(SHORT), {})
        assert "rollout_cuts_requests" in instance.log


def test_on_the_cpu_all_come_back_that_made_room_for_one_that_cannot_be_loaded(
    tmp_path: Path,
) -> None:
    old = echo("m", replicas=2) | {"path": "old", "memory": "45%"}
    new = echo("m", load_error="no such weights") | {"path": "new", "memory": "90%"}
    with Instance.up(tmp_path, [old], server=SERVER) as instance:
        before = {one.pid for one in instance.until_settled().models[0].replicas}
        reload(instance, tmp_path, new)

        def are_back() -> bool:
            there = {one.pid for one in workers(instance, "ready")}
            return len(there) == 2 and before.isdisjoint(there)

        instance.until("both are back", are_back)
        assert "no such weights" in cli(instance, "why", "m").stdout


@pytest.mark.lane("long")
def test_a_version_that_cannot_be_loaded_gives_its_place_back(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        Instance.up(tmp_path, [gpu_model("old", 60)], server=SERVER, env=gpus.env) as instance,
    ):
        url = instance.until_settled().url
        [old] = workers(instance, "ready")
        reload(instance, tmp_path, gpu_model("new", 60, load_error="no such weights"))
        instance.until("the old one makes room", lambda: not workers(instance, "ready"))
        waits = completion(pool, url, SHORT, stream=False)
        [back] = instance.until("the old version is back", lambda: workers(instance, "ready"))
        assert back.generation.partition(".")[0] == old.generation.partition(".")[0]
        assert (waits.over.result(20).text, waits.error) == (lap(SHORT), {})
        assert "no such weights" in cli(instance, "why", "m").stdout


@pytest.mark.lane("long")
def test_a_version_that_drains_hurries_when_the_next_one_needs_its_memory(
    tmp_path: Path, gpus: MadeUpGpus
) -> None:
    """The first reload has memory for both versions, the second has none for a third."""
    with (
        ThreadPoolExecutor(2) as pool,
        Instance.up(tmp_path, [gpu_model("first", 45)], server=SERVER, env=gpus.env) as instance,
    ):
        url = instance.until_settled().url
        long = completion(pool, url, LONG, stream=True)
        assert long.begun.wait(20)
        reload(instance, tmp_path, gpu_model("second", 45))
        instance.until("the first drains", lambda: workers(instance, "draining"))
        [second] = instance.until("the second serves", lambda: workers(instance, "ready"))
        assert not long.over.done()
        reload(instance, tmp_path, gpu_model("third", 45))

        def third_serves() -> bool:
            return any(one.pid != second.pid for one in workers(instance, "ready"))

        instance.until("the third serves", third_serves)
        assert long.over.result(20).error["code"] == "model_changed", long.lines[-3:]
        assert lap(LONG).startswith(long.text)
        assert completion(pool, url, SHORT, stream=True).over.result(20).text == lap(SHORT)
        instance.until("one is left", lambda: len(instance.model("m").replicas) == 1)
