"""A token bucket: so many a minute, and a minute's worth at once. Pure; times are the caller's."""

from __future__ import annotations


class Bucket:
    """Holds at most `limit`, and fills by `limit` a minute. Its level may be below zero."""

    __slots__ = ("_at_s", "_level", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is in it by now."""
        filled = self._level + (now_s - self._at_s) * self.limit / 60.0
        self._level = min(float(self.limit), filled)
        self._at_s = now_s
        return self._level

    def take(self, count: int, now_s: float) -> None:
        """Take out what has been used, however much there is."""
        self._level = self.level(now_s) - count

    def wait_s(self, wanted: float, now_s: float) -> float:
        """Until it holds so much; 0 if it does."""
        return max(0.0, (wanted - self.level(now_s)) * 60.0 / self.limit)

    def become(self, limit: int, now_s: float) -> None:
        """Go on with another limit: what has been used stays used."""
        used = self.limit - self.level(now_s)
        self.limit, self._level = limit, limit - used
