"""Percentiles: exact ones of stored values, and approximate ones of a histogram."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence

#: Buckets of a Histogram per factor of two: neighbours are 0.55 % apart.
_PER_DOUBLING = 126
_SCALE = _PER_DOUBLING / math.log(2.0)
#: Shorter times count as 0: the chunks came in the same read.
_LEAST_S = 1e-6


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate linearly between the nearest ranks (numpy's default); nan without values."""
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    return low + (high - low) * (rank - below)


class Sample:
    """Stored numbers, eight bytes each."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values = array("d", values)
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def greatest(self) -> float:
        return max(self.values)

    def last_values(self, count: int = 1000) -> Sample:
        """Return the last values."""
        return Sample(self.values[-count:])

    def percentile_value(self, percent: float) -> float:
        if len(self._ordered) != len(self.values):
            self._ordered = sorted(self.values)
        return percentile(self._ordered, percent)


class Histogram:
    """Counts of durations in logarithmic buckets, in a few kilobytes.

    Values are accurate to 0.3 %; 0 stays 0. Histograms of several processes can be merged.
    """

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    def add(self, value_s: float) -> None:
        bucket = bucket_of(value_s)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def merge(self, counts: Mapping[int, int]) -> None:
        for bucket, count in counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    def __len__(self) -> int:
        return sum(self.counts.values())

    @property
    def mean(self) -> float:
        total = math.fsum(value_of(bucket) * count for bucket, count in self.counts.items())
        return total / len(self)

    @property
    def greatest(self) -> float:
        return value_of(max(self.counts))

    def percentile_value(self, percent: float) -> float:
        """Return the value that `percent` percent of the values do not exceed."""
        wanted = max(1, math.ceil(len(self) * percent / 100))
        for bucket in sorted(self.counts):
            wanted -= self.counts[bucket]
            if wanted <= 0:
                return value_of(bucket)
        raise ValueError("a percentile of nothing")


def bucket_of(value_s: float) -> int:
    """Return the bucket of a duration: 0 for none, the others count from a microsecond."""
    if value_s < _LEAST_S:
        return 0
    return 1 + int(math.log(value_s / _LEAST_S) * _SCALE)


def value_of(bucket: int) -> float:
    """Return the middle of a bucket, in seconds."""
    if bucket == 0:
        return 0.0
    return _LEAST_S * math.exp((bucket - 0.5) / _SCALE)
