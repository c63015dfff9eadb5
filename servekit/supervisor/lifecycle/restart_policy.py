"""When a child that died is started again: a pure policy.

    what happened                                      then
    a fruitful life ended                              the back-off starts over     backoff
    any other life ended                               restart after back-off       backoff
    failed to boot in a way that would be the same     never, until a reload        failed
    … and a model's lives are fruitless in a row       its breaker has the word     (breaker.py)

A life is fruitful once it has completed a request, or has been ready for `healthy_s`. Back-off
doubles from `first_s` to `longest_s`, spread by ± `jitter` so that replicas that died together do
not come back together. Coming up alone does not reset it: a worker that crashes a moment after it
is ready is in a crash loop too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds."""

    first_s: float = 0.1
    longest_s: float = 30.0
    jitter: float = 0.2
    healthy_s: float = 30.0


class RestartPolicy:
    """One child's record. `random` gives numbers in [0, 1)."""

    def __init__(self, random: Callable[[], float], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._random = random
        self._delays = 0  # how often in a row it was delayed

    def is_fruitful(self, served: int, ready_s: float) -> bool:
        """Whether a life that has `served` requests and been ready for so long was of use."""
        return served > 0 or ready_s >= self.limits.healthy_s

    def after_s(self, *, fruitful: bool) -> float:
        """A life has ended: when the next one begins."""
        if fruitful:
            self._delays = 0
        # The exponent is bounded so that a year of crashes does not overflow a float.
        delay_s = self.limits.first_s * 2.0 ** min(self._delays, 32)
        self._delays += 1
        return self._spread(min(delay_s, self.limits.longest_s))

    def forget(self) -> None:
        """An operator asks for another try: what was before does not delay it."""
        self._delays = 0

    def _spread(self, delay_s: float) -> float:
        return delay_s * (1 + self.limits.jitter * (2 * self._random() - 1))
