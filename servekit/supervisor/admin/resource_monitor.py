"""Periodic measurement of the processes: memory, open files, GPU memory, shared memory.

The event loop does not wait for /proc: a memory map of thousands of lines takes milliseconds, many
times that on a busy machine, and that of a process which is stuck in the kernel may take for ever.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from servekit.protocol.messages import GpuStatus
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.lifecycle.managed_process import AnyChild, ManagedProcess
from servekit.supervisor.pace import Pace
from servekit.supervisor.process.run_dir import RunDir
from servekit.system import procfs, shared_memory, subreaper
from servekit.system.gpu.gpu_memory_audit import one_look, pids_by_group
from servekit.system.gpu.gpus import gpu_memory_by_pid, gpus_in_use
from servekit.system.orphan_cleanup import MARK, Started
from servekit.system.procfs import Process
from servekit.system.rlimits import count_open_files, is_shortage
from servekit.system.shared_memory import Segment

log: Any = structlog.get_logger("servekit.supervisor")

#: The age of figures that are fresh enough for an operator.
_FRESH_S = 1.0
#: The time between measurements of memory and open files, and at rest.
_MEMORY_EVERY_S, _MEMORY_AT_REST_S = 2.0, 50.0
#: The same of what takes milliseconds: NVML, the memory maps of all processes.
_REST_EVERY_S, _REST_AT_REST_S = 5.0, 50.0
#: The share of the files that a process may open from which an operator is warned.
_SCARCE = 0.9


class ResourceMonitor:
    """Monitor of the processes that `lives` returns at each time."""

    def __init__(
        self,
        deployments: DeploymentManager,
        lives: Callable[[], Sequence[ManagedProcess[Any]]],
        run_dir: RunDir,
        on_descendants: Callable[[], None],
        pace: Pace,
    ) -> None:
        self._deployments, self._lives = deployments, lives
        self._on_descendants, self._pace = on_descendants, pace
        self._run_dir = run_dir
        self._segments: set[Segment] = set()
        self._short_of_files: set[str] = set()
        self._shm_changed_at = self._recorded_shm_at = -1
        #: The segments in /dev/shm at the last two looks.
        self._present: tuple[frozenset[Segment], ...] = (frozenset(), frozenset())
        self._memory_s = self._rest_s = self._refreshed_s = -math.inf  # when it was measured
        self.descendants: tuple[Started, ...] = ()
        self.in_use: tuple[GpuStatus, ...] = ()

    async def monitor_resources(self) -> None:
        """Measure what is due, until cancelled."""
        while True:
            try:
                await self._measure_due(time.monotonic())
            except Exception as error:  # a figure that cannot be read must not stop the others
                if not is_shortage(error):  # `_check_files` warns of that
                    log.exception("measurement_failed")
            await self._pace.wait_for_tick()

    async def _measure_due(self, now_s: float) -> None:
        """Measure what is due."""
        at_rest = self._pace.is_at_rest()
        memory = now_s - self._memory_s >= (_MEMORY_AT_REST_S if at_rest else _MEMORY_EVERY_S)
        rest = now_s - self._rest_s >= (_REST_AT_REST_S if at_rest else _REST_EVERY_S)
        # at rest none is mapped that was there before
        segments = self._has_new_segments() or (rest and not (at_rest and self._has_all_segments))
        self._memory_s = now_s if memory else self._memory_s
        self._rest_s = now_s if rest else self._rest_s
        if memory:
            self._check_files()
        if memory or segments or rest:
            processes = await asyncio.to_thread(_read_processes)
            with one_look(pids_by_group(processes)):
                if memory:
                    self._measure_memory()
                if segments:
                    await self._note_segments()
            if rest:
                await self._note_descendants(processes)
                await self.gpus()

    async def refresh(self) -> None:
        """Measure what an operator is shown, unless that has just been done for all processes.

        Several may ask ten times a second, and a look at all processes takes milliseconds of CPU.
        """
        now_s = time.monotonic()
        is_new = any(
            one.child is not None and one.child.here and not one.rss_bytes for one in self._lives()
        )
        if is_new or now_s - self._refreshed_s > _FRESH_S:
            self._refreshed_s = now_s
            await self.memory()
            await self.gpus()

    async def memory(self) -> None:
        """Measure the resident memory of each process."""
        with one_look(await asyncio.to_thread(pids_by_group)):
            self._measure_memory()

    def _measure_memory(self) -> None:
        for life in self._lives():
            life.measure()

    def _check_files(self) -> None:
        """Warn of processes that have nearly as many files open as they may."""
        children = ((life.name, life.child) for life in self._lives())
        pids = {name: child.pid for name, child in children if child is not None and child.here}
        for name, pid in {"supervisor": os.getpid(), **pids}.items():
            try:
                count, limit = count_open_files(pid)
            except OSError:  # it has ended
                continue
            if count < limit * _SCARCE:
                self._short_of_files.discard(name)
            elif name not in self._short_of_files:
                self._short_of_files.add(name)
                log.warning("open_files_scarce", child=name, open_files=count, limit=limit)

    async def gpus(self) -> None:
        """Measure the GPU memory of each worker, and the use of the GPUs."""
        if self._deployments.gpus:
            self.in_use = await asyncio.to_thread(gpus_in_use, self._deployments.gpus)
            holdings = await asyncio.to_thread(gpu_memory_by_pid)
            with one_look(await asyncio.to_thread(pids_by_group)):
                for replica in self._deployments.replicas():
                    replica.measure_gpus(holdings)

    async def _note_descendants(self, processes: Sequence[Process]) -> None:
        """Record descendants without our mark, which could not be found after a kill -9."""
        found = await asyncio.to_thread(_find_unmarked, processes)
        if found != self.descendants:
            self.descendants = found
            self._on_descendants()

    def _has_new_segments(self) -> bool:
        """Return whether a segment has appeared in the last two looks: mapping follows creation."""
        before, present = self._present
        if (changed_at := shared_memory.changed_at()) != self._shm_changed_at:
            self._shm_changed_at, present = changed_at, shared_memory.present_segments()
        self._present = self._present[1], present
        return not present <= before

    @property
    def _has_all_segments(self) -> bool:
        """Whether no segment has come or gone since the last record."""
        return self._recorded_shm_at == self._shm_changed_at

    async def _note_segments(self) -> None:
        """Record the shared memory segments, which could not be found after a kill -9."""
        children = [life.child for life in self._lives() if life.child is not None]
        changed_at = shared_memory.changed_at()
        segments = await asyncio.to_thread(_read_segments, children)
        if segments == self._segments or self._record_segments(segments):
            self._segments, self._recorded_shm_at = segments, changed_at

    def note_segments_anew(self) -> None:
        """Record the segments again, after the record was lost."""
        self._record_segments(self._segments)

    def _record_segments(self, segments: set[Segment]) -> bool:
        try:
            shared_memory.record_segments(self._run_dir.path, segments)
        except OSError as error:
            log.warning("shared_memory_not_recorded", reason=error.strerror)
            return False
        return True


def _read_processes() -> list[Process]:
    return list(procfs.all_processes())


def _find_unmarked(processes: Sequence[Process]) -> tuple[Started, ...]:
    """Return the descendants without our mark that are not children of ours."""
    return tuple(
        Started("a descendant", process.pid, process.started)
        for process in procfs.find_descendants(os.getpid(), processes)
        if not subreaper.is_own(process.pid) and not procfs.has_variable(process.pid, MARK)
    )


def _read_segments(children: Sequence[AnyChild[Any]]) -> set[Segment]:
    """Return the segments that the children's groups have mapped so far."""
    with one_look():
        return {segment for child in children for segment in child.note_segments()}
