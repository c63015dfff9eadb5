"""When a child that died is started again: a pure policy; the clock is an argument.

    what happened                          then
    died after it had served               restart after back-off                     backoff
    … having served `healthy_s` or more    … the back-off starts over                 backoff
    failed to boot, permanent              never again, until the file changes        failed
    failed to boot, 1st to 4th in a row    restart after back-off                     backoff
    failed to boot, 5th or more in a row   a probe every `probe_s`                    failed
    came up                                boot failures forgotten, back-off kept     ready

Back-off doubles from `first_s` to `longest_s`, spread by ± `jitter` so that replicas that died
together do not come back together. It is kept when a child comes up, and forgotten only after
`healthy_s` of service: a worker that crashes a moment after it is ready is in a crash loop too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds."""

    first_s: float = 0.1
    longest_s: float = 30.0
    jitter: float = 0.2
    healthy_s: float = 30.0
    boot_failures: int = 5
    probe_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. `after_s` None: do not start it again."""

    state: Literal["backoff", "failed"]
    after_s: float | None


class RestartPolicy:
    """One child's record. `random` gives numbers in [0, 1)."""

    def __init__(self, random: Callable[[], float], limits: Limits | None = None) -> None:
        self._random = random
        self._limits = limits or Limits()
        self._delays = 0  # how often in a row it was delayed
        self._boot_failures = 0
        self._ready_at: float | None = None

    def came_up(self, now: float) -> None:
        self._ready_at = now
        self._boot_failures = 0

    def crashed(self, now: float) -> Decision:
        """It died after `came_up`."""
        if self._ready_at is not None and now - self._ready_at >= self._limits.healthy_s:
            self._delays = 0
        self._ready_at = None
        return Decision("backoff", self._next_delay_s())

    def boot_failed(self, *, permanent: bool) -> Decision:
        """It died, or gave up, before `came_up`."""
        self._ready_at = None
        self._boot_failures += 1
        if permanent:
            return Decision("failed", None)
        if self._boot_failures >= self._limits.boot_failures:
            return Decision("failed", self._spread(self._limits.probe_s))
        return Decision("backoff", self._next_delay_s())

    def _next_delay_s(self) -> float:
        # The exponent is bounded so that a year of crashes does not overflow a float.
        delay_s = self._limits.first_s * 2.0 ** min(self._delays, 32)
        self._delays += 1
        return self._spread(min(delay_s, self._limits.longest_s))

    def _spread(self, delay_s: float) -> float:
        return delay_s * (1 + self._limits.jitter * (2 * self._random() - 1))
