"""The data of the dashboard: figures of the last minutes, and recent events. Both are bounded.

The supervisor knows the requests of all gateways. It is asked every ASK_EVERY_S while a dashboard
is open, else every ASK_SELDOM_S, and every ASK_AT_REST_S while nothing happens. Events are the
differences between two states of each worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from servekit.errors import ServekitError
from servekit.gateway.api.admin.endpoints import Supervisor
from servekit.gateway.routing.router import Router
from servekit.gateway.ui.widgets.metrics_history import Sample, make_sample
from servekit.protocol.control.metrics_messages import Figures, GetMetrics
from servekit.protocol.messages import GetStatus, ModelStatus, ReplicaStatus, Status
from servekit.system.timers import next_tick_s

log: Any = structlog.get_logger("servekit.gateway")

EVERY_S = 1.0
SPAN_S = 300.0
HAPPENINGS = 100
#: The time between two questions to the supervisor, with open dashboards, without, and at rest.
ASK_EVERY_S = 2.0
ASK_SELDOM_S = 15.0
ASK_AT_REST_S = 60.0
#: A dashboard counts as closed after this time without a tick.
LOOKS_S = 10.0
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Happening:
    """An event of a worker or a model; each language makes its sentence from these parts."""

    at: float  # Unix time, s
    name: str
    kind: str  # "state.ready", "died", "gone", …: a key of the texts
    detail: str = ""
    model: str = ""  # the model's own name


@dataclass(slots=True)
class StatusPoller:
    """Polls the router and the supervisor while `live` runs."""

    router: Router
    supervisor: Supervisor
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=int(SPAN_S / ASK_EVERY_S)))
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=HAPPENINGS))
    _before: dict[str, ModelStatus] = field(default_factory=dict)
    _status: Status | None = None
    _asked_s: float = float("-inf")
    _seen_s: float = float("-inf")  # the last tick of a dashboard
    _asking: asyncio.Task[None] | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def poll(self) -> None:
        """Poll until cancelled: at once a second while there is news, else seldom."""
        self.router.listeners.append(self._news.set)
        is_active = True
        while True:
            self.record_changes()
            now_s = time.monotonic()
            seldom_s = ASK_SELDOM_S if is_active else ASK_AT_REST_S
            every_s = ASK_EVERY_S if now_s - self._seen_s < LOOKS_S else seldom_s
            if now_s - self._asked_s >= every_s:
                is_active = False
                await self._asked()
            try:
                async with asyncio.timeout(self._asked_s + every_s - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                continue
            self._news.clear()
            is_active = True
            await asyncio.sleep(next_tick_s(EVERY_S, asyncio.get_running_loop().time()))

    def record_changes(self) -> None:
        """Record the events since the last call."""
        now = {name: route.status for name, route in self.router.routes.items()}
        self.happenings.extend(list_changes(self._before, now, time.time()))
        self._before = now

    async def recent_status(self) -> Status | None:
        """Return a recent status of all processes; None while the supervisor does not answer."""
        self._seen_s = time.monotonic()
        self._news.set()
        if self._seen_s - self._asked_s >= ASK_EVERY_S:
            await self._asked()
        return self._status

    async def _asked(self) -> None:
        """Ask the supervisor, once for all concurrent callers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._fetch_status())
        await asyncio.shield(self._asking)

    def add_sample(self, sample: Sample) -> None:
        """Keep a sample, without those of a later time: the clock was set back.

        Nor those from before the span: with no dashboard open, samples are minutes apart.
        """
        if self.samples and self.samples[-1].at > sample.at:
            self.samples.clear()
        while self.samples and sample.at - self.samples[0].at > SPAN_S:
            self.samples.popleft()
        self.samples.append(sample)

    async def _fetch_status(self) -> None:
        try:
            status = await self.supervisor.answer_to(GetStatus(), Status, ANSWER_S)
            counted = await self.supervisor.answer_to(GetMetrics(), Figures, ANSWER_S)
            self._status = status
            self.add_sample(make_sample(time.time(), status, counted.series))
        except ServekitError as error:
            self._status = None
            log.debug("metrics_unavailable", reason=error.message)
        self._asked_s = time.monotonic()


# ---- events


def list_changes(
    before: Mapping[str, ModelStatus], now: Mapping[str, ModelStatus], at: float
) -> list[Happening]:
    """Return the events of models and their workers between two states."""
    found = [Happening(at, name, "gone", model=name) for name in before.keys() - now.keys()]
    for name, status in now.items():
        old = before.get(name)
        known = {} if old is None else {one.name: one for one in old.replicas}
        new = [
            one
            for replica in status.replicas
            for one in _of_replica(known.get(replica.name), replica, at)
        ]
        new += _of_adapters(old, status, at) if old is not None else []
        found += [dataclasses.replace(one, model=name) for one in new]
    return found


def _of_replica(old: ReplicaStatus | None, new: ReplicaStatus, at: float) -> Iterator[Happening]:
    if old is not None and new.restarts > old.restarts:
        yield Happening(at, new.name, "died", new.reason)
    if old is None or old.state != new.state:
        failed = new.state in ("failed", "backoff", "stalled")
        yield Happening(at, new.name, f"state.{new.state}", new.reason if failed else "")
    if new.trouble and (old is None or old.trouble != new.trouble):
        yield Happening(at, new.name, "trouble", new.trouble)


def _of_adapters(old: ModelStatus, new: ModelStatus, at: float) -> Iterator[Happening]:
    known = {one.name: one.state for one in old.adapters}
    for one in new.adapters:
        if known.pop(one.name, None) != one.state:
            yield Happening(at, f"{new.name} · {one.name}", f"adapter.{one.state}", one.reason)
    for name in known:
        yield Happening(at, f"{new.name} · {name}", "gone")
