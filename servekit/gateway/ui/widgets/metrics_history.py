"""Figures of the whole instance over time: what the supervisor said, look by look.

Gateways tell it about once a second what they count, so a rate is taken over some seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from servekit.metrics import BY_NAME
from servekit.protocol.messages import Status
from servekit.protocol.metrics_messages import Series

#: A GPU: its node, "" for this machine, and its index there.
Which = tuple[str, int]

FIRST = "gen_ai_server_time_to_first_token_seconds"
#: Upper bounds of the buckets, s, without infinity.
BOUNDS_S = BY_NAME[FIRST].buckets
NONE = (0.0,) * (len(BOUNDS_S) + 1)
#: A rate is that of the last so many seconds, at least.
RATE_OVER_S = 4.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the instance."""

    at: float  # Unix time, s
    tokens: int = 0  # given out since the supervisor began
    running: int = 0  # requests, at all gateways
    waiting: dict[str, int] = field(default_factory=dict)  # by model
    restarts: int = 0  # of workers, in all
    busy: dict[Which, float] = field(default_factory=dict)  # of a GPU's time, 0 to 1
    used: dict[Which, float] = field(default_factory=dict)  # of a GPU's memory, 0 to 1
    firsts: tuple[float, ...] = NONE  # first tokens so far, by bucket

    @property
    def queued(self) -> int:
        return sum(self.waiting.values())


def sample(at: float, status: Status, series: Sequence[Series]) -> Sample:
    """What the supervisor says, as a sample."""
    waiting = {one.model: one.queued for one in status.traffic}
    in_flight = sum(one.in_flight for one in status.gateways)
    return Sample(
        at,
        tokens=sum(one.tokens for one in status.traffic),
        running=max(0, in_flight - sum(waiting.values())),
        waiting=waiting,
        restarts=sum(one.restarts for model in status.models for one in model.replicas),
        busy={
            (gpu.node, gpu.index): gpu.utilisation
            for gpu in status.gpus
            if gpu.utilisation is not None
        },
        used={(gpu.node, gpu.index): gpu.used_bytes / gpu.total_bytes for gpu in status.gpus},
        firsts=_firsts(series),
    )


def _firsts(series: Sequence[Series]) -> tuple[float, ...]:
    """The counts of all models together; the last figure of each is a sum, and no count."""
    own = [one.figures[:-1] for one in series if one.metric == FIRST]
    fit = [counts for counts in own if len(counts) == len(NONE)]
    return tuple(map(sum, zip(*fit, strict=True))) if fit else NONE


def rates(samples: Sequence[Sample]) -> list[float]:
    """Tokens a second at each sample, by the last one that is some seconds older."""
    found, then = [], 0
    for at, one in enumerate(samples):
        while then + 1 < at and one.at - samples[then + 1].at >= RATE_OVER_S:
            then += 1
        since_s = one.at - samples[then].at
        found.append(max(0, one.tokens - samples[then].tokens) / since_s if since_s > 0 else 0.0)
    return found


def median_s(before: Sample, now: Sample) -> float | None:
    """Of the first tokens that came between two samples; None if there were none."""
    counts = [max(0.0, b - a) for a, b in zip(before.firsts, now.firsts, strict=True)]
    rest = sum(counts) / 2
    if not rest:
        return None
    lower_s = 0.0
    for upper_s, count in zip(BOUNDS_S, counts, strict=False):
        if count and count >= rest:  # evenly spread within a bucket, as far as is known
            return lower_s + (upper_s - lower_s) * rest / count
        rest -= count
        lower_s = upper_s
    return lower_s  # longer than the longest that is told apart
