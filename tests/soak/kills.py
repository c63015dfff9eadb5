"""Deaths on a schedule, of workers and of engines alone, and what is seen of each from outside."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from servekit.chaos.load import Load, Silences
from servekit.chaos.process_experiments import engine_processes, takes_fail_step
from servekit.chaos.target import Target, is_whole
from servekit.protocol.messages import Status
from servekit.system.parent_death import FAIL_STEP

_LOOK_EVERY_S = 0.05


@dataclass(slots=True)
class Kill:
    """One death. Times in seconds from it; None where the end came first."""

    of: str  # a key of DEATHS

    worker: str
    pid: int
    at: float  # Unix time
    began_s: float  # monotonic
    silences: Silences
    in_flight: int = 0  # streams on it, as the gateways counted them
    noticed_s: float | None = None
    back_s: float | None = None  # its successor is ready
    whole_s: float | None = None  # all workers are ready

    def rerouted_s(self, step_s: float) -> list[float]:
        """How much longer than a step the streams of this worker were silent."""
        return [max(0.0, silent_s - step_s) for silent_s in self.silences.longest(self.in_flight)]


def kill_worker(pid: int) -> None:
    """SIGKILL the worker itself."""
    os.kill(pid, signal.SIGKILL)


def raise_in_step(pid: int) -> None:
    """Have its engine's next step raise; the instance must be started for that."""
    if not takes_fail_step(pid):
        raise ProcessLookupError
    os.kill(pid, FAIL_STEP)


def kill_engine(pid: int) -> None:
    """SIGKILL the process below it that leads its engine: vLLM's engine core, or a rank."""
    processes = engine_processes(pid)
    if not processes:
        raise ProcessLookupError
    os.kill(processes[0], signal.SIGKILL)


#: Ways to die; each raises ProcessLookupError where the process is gone already.
DEATHS: dict[str, Callable[[int], None]] = {
    "worker": kill_worker,
    "step": raise_in_step,
    "engine": kill_engine,
}


class Killer:
    """Ends a random worker that is ready, every so often, and watches them come back.

    `ways` are keys of DEATHS, of which each turn draws one.
    """

    def __init__(
        self, target: Target, load: Load, every_s: float, seed: int, ways: Sequence[str]
    ) -> None:
        self._ways = ways
        self.kills: list[Kill] = []
        self.spared = 0  # turns when no worker was there to be killed
        self.ready_s: list[tuple[float, int]] = []  # workers ready, whenever looked
        self._target = target
        self._load = load
        self._every_s = every_s
        self._draw = random.Random(seed)

    async def run(self, for_s: float) -> None:
        """Kill until the time is up, then wait for all to be whole again."""
        watch = asyncio.create_task(self._watch())
        began = time.monotonic()
        for turn in range(1, int(for_s / self._every_s)):
            await asyncio.sleep(max(0.0, began + turn * self._every_s - time.monotonic()))
            await self._kill_one()
        await self._target.until_whole(120.0)
        await asyncio.sleep(2 * _LOOK_EVERY_S)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        self._read_logs()

    async def _kill_one(self) -> None:
        ready = await self._target.ready_replicas()
        if not ready:
            self.spared += 1
            return
        victim, way = self._draw.choice(ready), self._draw.choice(self._ways)
        silences = Silences(self._load.active)
        kill = Kill(way, victim.name, victim.pid, time.time(), time.monotonic(), silences)
        try:
            DEATHS[way](victim.pid)
        except (
            ProcessLookupError,
            FileNotFoundError,
        ):  # dead already, and on a busy machine not yet known to be
            self.spared += 1
        else:
            self.kills.append(kill)

    async def _watch(self) -> None:
        while True:
            status = await self._target.read_status()
            now = time.monotonic()
            ready = {r.name: r.pid for m in status.models for r in m.replicas if r.state == "ready"}
            self.ready_s.append((now, len(ready)))
            for kill in self.kills:
                self._note(kill, ready, status, now)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _note(self, kill: Kill, ready: dict[str, int], status: Status, now: float) -> None:
        if kill.back_s is None and ready.get(kill.worker, kill.pid) != kill.pid:
            kill.back_s = now - kill.began_s
        if kill.whole_s is None and is_whole(status, kill.pid):
            kill.whole_s = now - kill.began_s

    def _read_logs(self) -> None:
        since = self.kills[0].at if self.kills else 0.0
        lost = [e for e in self._target.gateway_events(since) if e.get("event") == "worker_lost"]
        for kill in self.kills:
            first_by_gateway = _first(event for event in lost if _is_of(event, kill))
            if first_by_gateway:
                kill.noticed_s = max(event["at"] for event in first_by_gateway) - kill.at
                kill.in_flight = sum(event["in_flight"] for event in first_by_gateway)


def _first(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first event of each gateway."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        found.setdefault(event["process"], event)
    return list(found.values())


def _is_of(event: dict[str, Any], kill: Kill) -> bool:
    return bool(event["worker"] == kill.worker and 0 <= event["at"] - kill.at < 1.0)
