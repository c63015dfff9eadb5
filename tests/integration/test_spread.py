"""A replica of several processes: comes up as one, goes down as one, and leaves nothing behind.

On the CPU, with as many ranks as it would have GPUs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.chaos import run as chaos
from servekit.chaos.result import ExperimentContext, ExperimentResult
from servekit.chaos.target import Target
from servekit.system import procfs
from tests.integration.instance import Instance
from tests.integration.test_faults_supervisor import cli
from tests.polling import poll
from tests.unit.engines.harness import write_tiny_llama

RANKS = 2
#: Importing torch and transformers, two processes to each replica, on a busy machine.
UP_S = 180.0
pytestmark = [pytest.mark.lane("tensor-parallel"), pytest.mark.timeout(400)]


def spread(path: Path, **keys: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "path": str(path),
        "device": "cpu",
        "gpus_per_replica": RANKS,
        "parallel": "tensor",
        "options": {"threads": 1, "kv_cache_bytes": 2**22},
        **keys,
    }


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("spread")
    path = write_tiny_llama(folder / "model", spare_tokens=1)
    with Instance.up(folder, [spread(path, replicas=2, standby=True)]) as instance:
        instance.until_settled(UP_S)
        instance.until(
            "its standby is ready",
            lambda: any(each.state == "ready" for each in instance.model("tiny").standbys),
            UP_S,
        )
        yield instance


def ranks(worker: int) -> list[int]:
    """The other ranks of a worker."""
    return [
        process.pid
        for process in procfs.find_descendants(worker)
        if "servekit.engines.transformers.tensor_parallel.rank"
        in procfs.command_line(process.pid, 4096)
    ]


def is_forked(pid: int) -> bool:
    """From a standby: a fresh interpreter is told of its channel on its command line."""
    return "--control-fd" not in procfs.command_line(pid, 4096)


def answer(instance: Instance) -> str:
    body = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0}
    response = httpx.post(f"{instance.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_ranks_are_children_in_the_workers_group(instance: Instance) -> None:
    for index in range(2):
        worker = instance.replica(f"tiny/{index}").pid
        (rank,) = ranks(worker)
        assert os.getpgid(rank) == worker
    info = instance.model("tiny").info
    assert info is not None
    assert info.detail.endswith("tensor parallel, 2 ranks")


def test_a_rank_that_dies_takes_its_own_replica_down_and_up_again(instance: Instance) -> None:
    expected = answer(instance)
    before, other = instance.replica("tiny/0"), instance.replica("tiny/1")
    (rank,) = ranks(before.pid)
    os.kill(rank, signal.SIGKILL)
    killed_at = time.monotonic()
    poll("its worker is gone", lambda: procfs.read_process(before.pid) is None, within_s=1.0)
    assert time.monotonic() - killed_at < 1.0
    assert answer(instance) == expected  # by the other, meanwhile

    def up_again() -> bool:
        now = instance.replica("tiny/0")
        return now.state == "ready" and now.pid != before.pid

    instance.until("it serves again", up_again, UP_S)
    assert instance.replica("tiny/1").pid == other.pid
    assert is_forked(instance.replica("tiny/0").pid)
    assert len(ranks(instance.replica("tiny/0").pid)) == 1
    assert answer(instance) == expected
    told = cli(instance, "why", "tiny").stdout
    assert f"rank 1 of 2 (pid {rank}) was killed by SIGKILL" in told


def test_under_load_a_ranks_death_is_seen_by_nobody(instance: Instance) -> None:
    """As `servekit chaos` kills it; how soon all is whole again is another test's."""

    async def kill(url: str) -> ExperimentResult:
        target = await Target.find_target(url, instance.run_dir, None)
        assert await target.until_whole(UP_S) is not None
        known = await chaos.known_answers(target, count=4)
        return await chaos.EXPERIMENTS["engine-process-killed"](
            ExperimentContext(target, known, 1.0, 4, 2)
        )

    finding = asyncio.run(kill(instance.url))
    assert (finding.failed, finding.wrong) == (0, 0) and finding.answered > 0
    assert "rank 1 of 2" in finding.detail and "was killed by SIGKILL" in finding.detail


def test_a_worker_that_is_killed_takes_its_ranks_with_it(instance: Instance) -> None:
    worker = instance.replica("tiny/1").pid
    (rank,) = ranks(worker)
    os.kill(worker, signal.SIGKILL)
    poll("its rank is gone", lambda: procfs.read_process(rank) is None, within_s=2.0)
    instance.until(
        "it serves again",
        lambda: instance.replica("tiny/1").state == "ready",
        UP_S,
    )
    assert instance.replica("tiny/1").pid != worker


def test_it_drains_and_leaves_nothing(tmp_path: Path) -> None:
    model = spread(write_tiny_llama(tmp_path / "model", spare_tokens=1))
    with Instance.up(tmp_path, [model]) as instance:
        instance.until_settled(UP_S)
        assert answer(instance)
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0
        assert not instance.survivors()
