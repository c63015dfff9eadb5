"""What is measured of the processes, and how often: memory, GPU memory, shared memory."""

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
from servekit.system.shared_memory import Segment

log: Any = structlog.get_logger("servekit.supervisor")

#: Memory is read once in so many ticks.
MEMORY_EVERY_TICKS = 10
#: What takes milliseconds is read less often: NVML with eight GPUs, the maps of all processes.
REST_EVERY_TICKS = 25


class ResourceMonitor:
    """Reads the figures of `lives`, whoever that is at the time."""

    def __init__(
        self,
        fleets: DeploymentManager,
        lives: Callable[[], Sequence[ManagedProcess[Any]]],
        run_dir: RunDir,
        on_descendants: Callable[[], None],
    ) -> None:
        self._fleets, self._lives = fleets, lives
        self._on_descendants = on_descendants
        self._run_dir = run_dir
        self._segments: set[Segment] = set()
        #: When there was last another segment in /dev/shm, at the last looks.
        self._changes = (0, 0)
        self.descendants: tuple[Started, ...] = ()
        self.in_use: tuple[GpuStatus, ...] = ()
        self._reading: asyncio.Task[None] | None = None

    def tick(self, count: int) -> None:
        """Called often, with how often before."""
        if count % MEMORY_EVERY_TICKS == 0:
            self.memory()
        if count % REST_EVERY_TICKS == 0 or self._segments_changed():
            self._note_segments()
        if count % REST_EVERY_TICKS == 0:
            self._note_descendants()
            if self._reading is None or self._reading.done():
                self._reading = asyncio.get_running_loop().create_task(self.gpus())

    def memory(self) -> None:
        """What each process has resident."""
        with one_look():
            for life in self._lives():
                life.measure()

    async def gpus(self) -> None:
        """What each worker holds on GPUs, and how the GPUs are."""
        if self._fleets.gpus:
            self.in_use = await asyncio.to_thread(gpus_in_use, self._fleets.gpus)
            holdings = await asyncio.to_thread(gpu_memory_by_pid)
            with one_look():
                for replica in self._fleets.replicas():
                    replica.measure_gpus(holdings)

    def _note_descendants(self) -> None:
        """Those of them that carry no mark could not be found any more after kill -9."""
        found = tuple(
            Started("a descendant", process.pid, process.started)
            for process in procfs.descendants(os.getpid())
            if not subreaper.is_own(process.pid) and not procfs.has(process.pid, MARK)
        )
        if found != self.descendants:
            self.descendants = found
            self._on_descendants()

    def note_segments_anew(self) -> None:
        """The record is gone."""
        self._segments = set()
        self._note_segments()

    def _segments_changed(self) -> bool:
        """Whether there were others at the last two looks: mapping comes after making."""
        before, self._changes = self._changes, (*self._changes[1:], shared_memory.changed_at())
        return len({*before, *self._changes}) > 1

    def _note_segments(self) -> None:
        """Write down which shared memory there is: after kill -9 nobody could find out."""
        with one_look():
            segments = {segment for life in self._lives() for segment in life.note_segments()}
        if segments == self._segments:
            return
        try:
            shared_memory.note(self._run_dir.path, segments)
        except OSError as error:
            log.warning("cannot record the shared memory", reason=error.strerror)
        else:
            self._segments = segments
