"""Experiments on the machine: memory pressure, and the death of the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

from servekit.chaos.result import ExperimentContext, ExperimentResult, Judge
from servekit.protocol.messages import Status
from servekit.system import cgroup, procfs
from servekit.units import format_bytes

#: The promise: no process, including grandchildren, is alive 2 s later.
GONE_WITHIN_S = 2.0
#: Maximum share of the free memory that is taken; the rest is for the service.
_MOST_OF_FREE = 0.8
#: Allocates and touches memory, reports it, and ends at EOF of stdin.
_HOG = """
import resource, sys
size = int(sys.argv[1])
limit = size + 256 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
block = bytearray(size)
block[::4096] = b"x" * len(range(0, size, 4096))
print("touched", flush=True)
sys.stdin.read()
"""


async def memory_pressure(scene: ExperimentContext) -> ExperimentResult:
    """Take much of the memory in another process, under a cap: the service must answer."""
    if not scene.memory_bytes:
        return Judge("memory pressure", "").skip("only with --memory")
    size_bytes = min(scene.memory_bytes, int(cgroup.available_memory_bytes() * _MOST_OF_FREE))
    judge = Judge("memory pressure", f"{format_bytes(size_bytes)} allocated beside it")
    before = await scene.target.read_status()
    async with scene.load() as load:
        await load.until_busy()
        hog = await _start_hog(size_bytes)
        try:
            judge.promise(await _await_touched(hog), "the memory could not be allocated")
            await asyncio.sleep(scene.seconds)
        finally:
            await _end_hog(hog)
    judge.clean(load.tally)
    judge.promise(
        _process_pids(before) == _process_pids(await scene.target.read_status()),
        "a process was lost",
    )
    return judge.finding(load.tally)


async def _start_hog(size_bytes: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOG, str(size_bytes), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


async def _await_touched(hog: asyncio.subprocess.Process) -> bool:
    assert hog.stdout is not None
    return await asyncio.wait_for(hog.stdout.readline(), 60.0) == b"touched\n"


async def _end_hog(hog: asyncio.subprocess.Process) -> None:
    assert hog.stdin is not None
    hog.stdin.close()
    await hog.wait()


def _process_pids(status: Status) -> set[int]:
    replicas = {replica.pid for model in status.models for replica in model.replicas}
    return replicas | {gateway.pid for gateway in status.gateways}


async def supervisor_killed(scene: ExperimentContext) -> ExperimentResult:
    """SIGKILL the supervisor under load: two seconds later no process may live. Runs last."""
    judge = Judge("supervisor killed", "SIGKILL to the supervisor; the instance is over")
    load = scene.load()
    load.excused = lambda answer: True  # the gateways die as well
    async with load:
        await load.until_busy()
        mine = scene.target.list_processes()
        os.kill(scene.target.pid, signal.SIGKILL)
        load.end_load()
        gone_s = await _until_gone(mine, scene)
    judge.expect_within(f"all {len(mine)} processes gone", gone_s, GONE_WITHIN_S)
    held = _memory_on_gpus({process.pid for process in mine})
    judge.promise(not held, f"GPU memory is held by {held}")
    left = sorted(path.name for path in scene.target.run_dir.glob("*.sock"))
    judge.notes.append(f"{len(mine)} processes gone after {gone_s or float('nan'):.2f} s")
    if left:
        judge.notes.append(f"the next start removes {', '.join(left)}")
    return judge.finding()


async def _until_gone(mine: list[procfs.Process], scene: ExperimentContext) -> float | None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < 2 * GONE_WITHIN_S:
        known = any(procfs.is_alive(process.pid, process.started) for process in mine)
        if not known and not scene.target.list_processes():
            return passed
        await asyncio.sleep(0.02)
    return None


def _memory_on_gpus(pids: set[int]) -> list[int]:
    """Return the processes that hold GPU memory, as far as NVML is available."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library or driver; pynvml has many classes
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        running = (pynvml.nvmlDeviceGetComputeRunningProcesses(handle) for handle in handles)
        return sorted({process.pid for one in running for process in one} & pids)
    finally:
        pynvml.nvmlShutdown()


EXPERIMENTS = {"memory": memory_pressure, "supervisor-killed": supervisor_killed}
