"""A token bucket with a rate per minute and a burst of one minute. Pure: callers pass the time."""

from __future__ import annotations


class Bucket:
    """A bucket of at most `limit` tokens, refilled by `limit` a minute. It may be overdrawn."""

    __slots__ = ("_at_s", "_level", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the present level, which may be negative."""
        filled = self._level + (now_s - self._at_s) * self.limit / 60.0
        self._level = min(float(self.limit), filled)
        self._at_s = now_s
        return self._level

    def take(self, count: int, now_s: float) -> None:
        """Take `count` tokens out, even if that overdraws the bucket."""
        self._level = self.level(now_s) - count

    def wait_s(self, wanted: float, now_s: float) -> float:
        """Return the seconds until the bucket holds `wanted` tokens; 0 if it does already."""
        return max(0.0, (wanted - self.level(now_s)) * 60.0 / self.limit)

    def become(self, limit: int, now_s: float) -> None:
        """Change the limit; tokens already used stay used."""
        used = self.limit - self.level(now_s)
        self.limit, self._level = limit, limit - used
