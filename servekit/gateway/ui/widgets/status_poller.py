"""What the dashboard shows: figures of the last minutes, and what has happened. All of it bounded.

The supervisor is asked every other second while somebody looks, and seldom else; it knows the
requests of all gateways. What happened is read off its word on each worker, before and after.
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
from servekit.gateway.ui.widgets.metrics_history import Sample, sample
from servekit.protocol.messages import GetStatus, ModelStatus, ReplicaStatus, Status
from servekit.protocol.metrics_messages import Figures, GetMetrics

log: Any = structlog.get_logger("servekit.gateway")

EVERY_S = 1.0
SPAN_S = 300.0
HAPPENINGS = 100
#: The supervisor is asked so often, however many look at the dashboard; and while nobody does.
ASK_EVERY_S = 2.0
ASK_SELDOM_S = 15.0
#: Who has not been here for so long does not look any more.
LOOKS_S = 10.0
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Happening:
    """What became of a worker or a model. The sentence is made of the parts, in any language."""

    at: float  # Unix time, s
    name: str
    kind: str  # "state.ready", "died", "gone", …: a key of the texts
    detail: str = ""
    model: str = ""  # by its own name


@dataclass(slots=True)
class StatusPoller:
    """Looks once a second, for as long as `live` runs."""

    router: Router
    supervisor: Supervisor
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=int(SPAN_S / ASK_EVERY_S)))
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=HAPPENINGS))
    _before: dict[str, ModelStatus] = field(default_factory=dict)
    _status: Status | None = None
    _asked_s: float = float("-inf")
    _seen_s: float = float("-inf")  # when somebody was last here
    _asking: asyncio.Task[None] | None = None

    async def live(self) -> None:
        """Look, until cancelled."""
        while True:
            self.look()
            now_s = time.monotonic()
            every_s = ASK_EVERY_S if now_s - self._seen_s < LOOKS_S else ASK_SELDOM_S
            if now_s - self._asked_s >= every_s:
                await self._asked()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Note what has changed."""
        now = {name: route.status for name, route in self.router.routes.items()}
        self.happenings.extend(changes(self._before, now, time.time()))
        self._before = now

    async def status(self) -> Status | None:
        """What the supervisor says of all processes, of lately; None while it does not answer."""
        self._seen_s = time.monotonic()
        if self._seen_s - self._asked_s >= ASK_EVERY_S:
            await self._asked()
        return self._status

    async def _asked(self) -> None:
        """It has been asked, once for all who want to know now."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        try:
            status = await self.supervisor.answer_to(GetStatus(), Status, ANSWER_S)
            counted = await self.supervisor.answer_to(GetMetrics(), Figures, ANSWER_S)
            self._status = status
            self.samples.append(sample(time.time(), status, counted.series))
        except ServekitError as error:
            self._status = None
            log.debug("no figures for the dashboard", reason=error.message)
        self._asked_s = time.monotonic()


# ---- what has happened


def changes(
    before: Mapping[str, ModelStatus], now: Mapping[str, ModelStatus], at: float
) -> list[Happening]:
    """What became of models and their workers between two looks."""
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
