"""The fork servers of one model.

There is one for each environment of its workers: one on the CPU, and one for each GPU or set of
GPUs that a replica has. They start when all workers have come up: they take nothing from those, and
the model's files have been fetched. They end when the model is unloaded,
unless that only makes room for another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.protocol.messages import Stop
from servekit.supervisor.deployments.config_diff import same_worker
from servekit.supervisor.lifecycle.managed_process import SupervisorContext
from servekit.supervisor.scheduling.placement import Assignment
from servekit.supervisor.workers.fork_server import ForkServer
from servekit.system import cgroup
from servekit.system.gpus import Slot
from servekit.system.subreaper import Forked

#: With `standby: auto`, the available memory below which none is started.
ROOM_BYTES = 4 * 2**30
_STOP_GRACE_S = 1.0


class Worker(Protocol):
    """A replica, as the pool sees it."""

    model: ModelConfig
    place: Assignment

    @property
    def state(self) -> str: ...


class ForkServerPool:
    """The fork servers of one model; empty until `tend`. `run` runs a fork server's task."""

    def __init__(self, host: SupervisorContext, run: Callable[[ForkServer], None]) -> None:
        self._host = host
        self._run = run
        self._closed = False
        self._at: dict[Slot, ForkServer] = {}
        self.standbys: list[ForkServer] = []  # ending ones included

    def tend(self, model: ModelConfig, workers: Sequence[Worker], *, away: bool = False) -> None:
        """Start the fork servers that are wanted, and end the others. Called often.

        `away`: the model is unloaded, and its memory is for other models.
        """
        wanted = _wanted(model) and not away and self._host.launcher is None
        workers = [one for one in workers if same_worker(one.model, model)]
        at_rest = all(one.state in ("ready", "asleep", "failed", "stopped") for one in workers)
        for slot, standby in list(self._at.items()):
            if not wanted or not same_worker(standby.model, model):
                self._end(slot)
        for worker in workers if at_rest and wanted and not self._closed else ():
            if worker.state == "ready" and worker.place.gpus not in self._at:
                self._start(model, worker.place)

    def close(self) -> None:
        """End all fork servers for good."""
        self._closed = True
        for slot in list(self._at):
            self._end(slot)

    def ended(self, standby: ForkServer) -> None:
        """Forget a fork server that has ended."""
        self.standbys.remove(standby)

    async def fork(
        self,
        model: ModelConfig,
        place: Assignment,
        env: Mapping[str, str],
        mark: str,
        control_fd: int,
        output_fd: int,
    ) -> Forked | None:
        """Fork a worker of `model` for that place; None if a fresh interpreter must be used."""
        standby = self._at.get(place.gpus)
        if standby is None or not same_worker(standby.model, model):
            return None
        return await standby.fork(place.name, env, mark, control_fd, output_fd)

    def _start(self, model: ModelConfig, place: Assignment) -> None:
        if model.standby == "auto" and cgroup.available_memory_bytes() < ROOM_BYTES:
            return
        standby = ForkServer(model, place, self._host)
        self._at[place.gpus] = standby
        self.standbys.append(standby)
        self._run(standby)

    def _end(self, slot: Slot) -> None:
        self._at.pop(slot).end(Stop(), _STOP_GRACE_S)


def _wanted(model: ModelConfig) -> bool:
    return KINDS[model.engine].standby if model.standby == "auto" else model.standby
