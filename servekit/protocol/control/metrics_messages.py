"""Messages that carry the figures of /metrics; the metrics are defined in `servekit.metrics`.

gateway → supervisor   Counted
operator → supervisor  GetMetrics   from a gateway, for a client of /metrics
supervisor → operator  Figures

Gateways send the increments since their last report; the supervisor sums them. A counter therefore
outlives the gateway that counted, no increment is sent twice, and there is one sum: no counter goes
backwards, whichever gateway is scraped.
"""

from __future__ import annotations

from servekit.protocol.base import Message, Value


class Series(Value, frozen=True):
    """Figures of one metric under one set of labels, in the metric's order.

    A counter or gauge has one figure; a histogram has the count of each bucket, the count above the
    last bound, and the sum of all observations.
    """

    metric: str
    labels: tuple[str, ...]
    figures: list[float]


class Counted(Message, frozen=True):
    """Increments of a gateway's metrics since its last report, about once a second; no gauges."""

    series: tuple[Series, ...]


class GetMetrics(Message, frozen=True):
    """Ask for the current metrics. Answered by Figures, without a new measurement."""


class Figures(Message, frozen=True):
    series: tuple[Series, ...]
