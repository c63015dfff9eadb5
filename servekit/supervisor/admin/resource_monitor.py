"""Periodic measurement of the processes: memory, open files, GPU memory, shared memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from servekit.protocol.messages import GpuStatus
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.lifecycle.managed_process import ManagedProcess
from servekit.supervisor.process.run_dir import RunDir
from servekit.system import procfs, shared_memory, subreaper
from servekit.system.gpu_memory_audit import one_look
from servekit.system.gpus import gpu_memory_by_pid, gpus_in_use
from servekit.system.orphan_cleanup import MARK, Started
from servekit.system.rlimits import count_open_files
from servekit.system.shared_memory import Segment

log: Any = structlog.get_logger("servekit.supervisor")

#: Ticks between measurements of memory and open files.
MEMORY_EVERY_TICKS = 10
#: Ticks between measurements that take milliseconds: NVML, the memory maps of all processes.
REST_EVERY_TICKS = 25
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
    ) -> None:
        self._deployments, self._lives = deployments, lives
        self._on_descendants = on_descendants
        self._run_dir = run_dir
        self._segments: set[Segment] = set()
        self._short_of_files: set[str] = set()
        #: Times of the last change in /dev/shm, as seen by the last two looks.
        self._changes = (0, 0)
        self.descendants: tuple[Started, ...] = ()
        self.in_use: tuple[GpuStatus, ...] = ()
        self._reading: asyncio.Task[None] | None = None

    def measure_due(self, count: int) -> None:
        """Measure what is due; call this often, with the number of ticks so far."""
        if count % MEMORY_EVERY_TICKS == 0:
            self._check_files()
            self.memory()
        if count % REST_EVERY_TICKS == 0 or self._segments_changed():
            self._note_segments()
        if count % REST_EVERY_TICKS == 0:
            self._note_descendants()
            if self._reading is None or self._reading.done():
                self._reading = asyncio.get_running_loop().create_task(self.gpus())

    def memory(self) -> None:
        """Measure the resident memory of each process."""
        with one_look():
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
            with one_look():
                for replica in self._deployments.replicas():
                    replica.measure_gpus(holdings)

    def _note_descendants(self) -> None:
        """Record descendants without our mark, which could not be found after a kill -9."""
        found = tuple(
            Started("a descendant", process.pid, process.started)
            for process in procfs.find_descendants(os.getpid())
            if not subreaper.is_own(process.pid) and not procfs.has_variable(process.pid, MARK)
        )
        if found != self.descendants:
            self.descendants = found
            self._on_descendants()

    def note_segments_anew(self) -> None:
        """Record the shared memory again, after the record was lost."""
        self._segments = set()
        self._note_segments()

    def _segments_changed(self) -> bool:
        """Return whether /dev/shm changed at the last two looks: mapping follows creation."""
        before, self._changes = self._changes, (*self._changes[1:], shared_memory.changed_at())
        return len({*before, *self._changes}) > 1

    def _note_segments(self) -> None:
        """Record the shared memory segments, which could not be found after a kill -9."""
        with one_look():
            segments = {segment for life in self._lives() for segment in life.note_segments()}
        if segments == self._segments:
            return
        try:
            shared_memory.record_segments(self._run_dir.path, segments)
        except OSError as error:
            log.warning("shared_memory_not_recorded", reason=error.strerror)
        else:
            self._segments = segments
