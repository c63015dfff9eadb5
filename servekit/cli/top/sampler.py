"""The samples of `servekit top`: the newest status, rates over the last seconds, events.

The memory used does not grow with time.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from servekit.event_store import Event
from servekit.protocol.messages import ModelStatus, Status

#: Window of rates: gateways report once a second, so a shorter window would be noisy.
WINDOW_S = 5.0
_MOST_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class View:
    """The state at one moment. `trouble` is a sentence if `status` is outdated, else ""."""

    status: Status
    rates: dict[str, float] = field(default_factory=dict)  # tokens/s, by model
    events: tuple[Event, ...] = ()
    trouble: str = ""
    at: float = 0.0  # Unix time, s


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    tokens: dict[str, int]


class Sampler:
    """A window of samples, from which views are made."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=_MOST_SAMPLES)
        self._status: Status | None = None
        self._lost_at = 0.0

    def add_status(self, status: Status, now_s: float) -> None:
        """Add a status. `now_s` is on the monotonic clock."""
        if self._status is None or self._status.pid != status.pid:
            self._samples.clear()
        self._status, self._lost_at = status, 0.0
        self._samples.append(_Sample(now_s, {one.model: one.tokens for one in status.traffic}))
        while len(self._samples) > 2 and now_s - self._samples[1].at_s >= WINDOW_S:
            self._samples.popleft()

    def view(self, events: tuple[Event, ...], lost: str = "") -> View | None:
        """Return the current view; None before the first status. `lost`: why there is no answer
        now.
        """
        if self._status is None:
            return None
        now = time.time()
        if not lost:
            return View(self._status, self._rates(), events, at=now)
        self._lost_at = self._lost_at or now
        since = time.strftime("%H:%M:%S", time.localtime(self._lost_at))
        return View(self._status, {}, events, f"{lost}; showing the state of {since}", now)

    def _rates(self) -> dict[str, float]:
        if len(self._samples) < 2:
            return {}
        first, last = self._samples[0], self._samples[-1]
        took_s = max(last.at_s - first.at_s, 0.001)
        return {
            model: max(0, tokens - first.tokens.get(model, 0)) / took_s
            for model, tokens in last.tokens.items()
        }


def count_queued(status: Status, model: ModelStatus) -> int:
    """Return the number of requests that wait for a model at the gateways."""
    return next((one.queued for one in status.traffic if one.model == model.name), 0)
