"""Figures of the whole instance over time, as samples of the supervisor's answers.

Gateways report their counts about once a second, so a rate is averaged over several seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from servekit.metrics import BY_NAME
from servekit.protocol.control.metrics_messages import Series
from servekit.protocol.messages import Status

#: A GPU: its node ("" for this machine), and its index there.
Which = tuple[str, int]

FIRST = "gen_ai_server_time_to_first_token_seconds"
#: The upper bounds of the buckets, s, without infinity.
BOUNDS_S = BY_NAME[FIRST].buckets
NONE = (0.0,) * (len(BOUNDS_S) + 1)
#: The least time over which a rate is averaged.
RATE_OVER_S = 4.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of the instance at one moment."""

    at: float  # Unix time, s
    tokens: int = 0  # generated since the supervisor's start
    running: int = 0  # requests, over all gateways
    waiting: dict[str, int] = field(default_factory=dict)  # by model
    restarts: int = 0  # of all workers
    busy: dict[Which, float] = field(default_factory=dict)  # the busy share of a GPU's time, 0 to 1
    used: dict[Which, float] = field(default_factory=dict)  # the used share of its memory
    firsts: tuple[float, ...] = NONE  # first tokens so far, by bucket

    @property
    def queued(self) -> int:
        return sum(self.waiting.values())


def make_sample(at: float, status: Status, series: Sequence[Series]) -> Sample:
    """Return the supervisor's answers as a sample."""
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
        firsts=_sum_firsts(series),
    )


def _sum_firsts(series: Sequence[Series]) -> tuple[float, ...]:
    """Return the counts of all models together, without the last figure of each, which is a sum."""
    own = [one.figures[:-1] for one in series if one.metric == FIRST]
    fit = [counts for counts in own if len(counts) == len(NONE)]
    return tuple(map(sum, zip(*fit, strict=True))) if fit else NONE


def compute_rates(samples: Sequence[Sample]) -> list[float]:
    """Return the tokens per second at each sample, since a sample at least RATE_OVER_S older."""
    found, then = [], 0
    for at, one in enumerate(samples):
        while then + 1 < at and one.at - samples[then + 1].at >= RATE_OVER_S:
            then += 1
        since_s = one.at - samples[then].at
        found.append(max(0, one.tokens - samples[then].tokens) / since_s if since_s > 0 else 0.0)
    return found


def median_s(before: Sample, now: Sample) -> float | None:
    """Return the median TTFT of the first tokens between two samples; None if there were none."""
    counts = [max(0.0, b - a) for a, b in zip(before.firsts, now.firsts, strict=True)]
    rest = sum(counts) / 2
    if not rest:
        return None
    lower_s = 0.0
    for upper_s, count in zip(BOUNDS_S, counts, strict=False):
        if count and count >= rest:  # assumes an even spread within the bucket
            return lower_s + (upper_s - lower_s) * rest / count
        rest -= count
        lower_s = upper_s
    return lower_s  # beyond the last bucket's bound
