"""Messages that carry what /metrics shows; the metrics themselves are in `servekit.metrics`.

gateway → supervisor   Counted
operator → supervisor  GetMetrics   a gateway, for whoever asks it for /metrics
supervisor → operator  Figures

Gateways tell what they have counted since they told last, and forget it; the supervisor adds it
up. So a counter outlives the gateway that counted, none is ever told twice, and there is one sum:
whichever gateway is asked, and in whatever order, no counter goes backwards.
"""

from __future__ import annotations

from servekit.protocol.base import Message, Value


class Series(Value, frozen=True):
    """Figures of one metric under one set of labels, in the order that the metric has them.

    A counter and a gauge have one; a histogram has the count of each bucket, that above the last
    boundary, and the sum of all that was observed.
    """

    metric: str
    labels: tuple[str, ...]
    figures: list[float]


class Counted(Message, frozen=True):
    """What a gateway has counted since it said so last, about once a second; no gauges."""

    series: tuple[Series, ...]


class GetMetrics(Message, frozen=True):
    """What is there to show? Answered by Figures, of what is known: nothing is measured for it."""


class Figures(Message, frozen=True):
    series: tuple[Series, ...]
