"""The process that takes memory, and what counts as gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from servekit.chaos import machine_experiments as experiments
from servekit.chaos.result import ExperimentContext
from servekit.chaos.target import Target
from servekit.system import procfs
from tests.unit.cli.instance import make_model, make_replica, make_status


def context(tmp_path: Path) -> ExperimentContext:
    target = Target("http://127.0.0.1:1", tmp_path, make_status(), "m", "no-such-mark")
    target.pid = -1
    return ExperimentContext(target, ())


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    [held] = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return int(held) * 1024


async def test_memory_is_taken_only_if_asked(tmp_path: Path) -> None:
    finding = await experiments.memory_pressure(context(tmp_path))
    assert (finding.verdict, finding.detail) == ("skipped", "only with --memory")


async def test_memory_is_touched_and_given_back() -> None:
    hog = await experiments._start_hog(20 * 2**20)
    assert await experiments._await_touched(hog)
    assert resident_bytes(hog.pid) > 20 * 2**20
    await experiments._end_hog(hog)
    assert hog.returncode == 0


async def test_memory_that_cannot_be_had_is_noticed() -> None:
    hog = await experiments._start_hog(2**60)
    assert not await experiments._await_touched(hog)
    await experiments._end_hog(hog)


def test_processes_of_a_status_are_workers_and_gateways() -> None:
    model = make_model("m", make_replica("m/0"))
    assert experiments._process_pids(make_status(model)) == {11, 12}


async def test_gone_means_that_no_process_lives(tmp_path: Path) -> None:
    scene = context(tmp_path)
    process = await asyncio.create_subprocess_exec("sleep", "600")
    found = procfs.read_process(process.pid)
    assert found is not None
    process.kill()
    await process.wait()
    gone_s = await experiments._until_gone([found], scene)
    assert gone_s is not None and gone_s < experiments.GONE_WITHIN_S
    assert await experiments._until_gone([], scene) is not None


def test_no_process_of_ours_holds_gpu_memory_where_no_gpu_is() -> None:
    assert experiments._memory_on_gpus({os.getpid()}) == []
