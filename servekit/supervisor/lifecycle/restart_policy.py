"""The restart policy of a child that died: no I/O; the random numbers are an argument.

    event                                              reaction                     state
    a fruitful life ended                              the back-off starts over     backoff
    any other life ended                               restart after back-off       backoff
    a boot failure that would repeat unchanged         no restart, until a reload   failed
    a model's lives are fruitless in a row             its breaker decides          (breaker.py)

A life is fruitful once it has completed a request, or has been ready for `healthy_s`. Back-off
doubles from `first_s` to `longest_s`, spread by ± `jitter` so that replicas that died together do
not come back together. Becoming ready does not reset it: a worker that crashes a moment after it is
ready is in a crash loop too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the back-off; times in seconds."""

    first_s: float = 0.1
    longest_s: float = 30.0
    jitter: float = 0.2
    healthy_s: float = 30.0


class RestartPolicy:
    """The back-off of one child. `random` gives numbers in [0, 1)."""

    def __init__(self, random: Callable[[], float], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._random = random
        self._delays = 0  # restarts delayed in a row

    def is_fruitful(self, served: int, ready_s: float) -> bool:
        """Return whether a life with `served` requests, ready for `ready_s`, was of use."""
        return served > 0 or ready_s >= self.limits.healthy_s

    def after_s(self, *, fruitful: bool) -> float:
        """Return the delay from a life's end to the next start."""
        if fruitful:
            self._delays = 0
        # The exponent is bounded so that a year of crashes does not overflow a float.
        delay_s = self.limits.first_s * 2.0 ** min(self._delays, 32)
        self._delays += 1
        return self._spread(min(delay_s, self.limits.longest_s))

    def forget(self) -> None:
        """Reset the back-off, as when an operator asks for another try."""
        self._delays = 0

    def _spread(self, delay_s: float) -> float:
        return delay_s * (1 + self.limits.jitter * (2 * self._random() - 1))
