"""GET /metrics: the metrics of the whole instance, from whichever gateway is asked.

For each page the gateway asks the supervisor, which adds up the metrics of all processes
(`servekit.protocol.control.metrics_messages`). Figures of one gateway alone, or cached ones, could
be lower than what another gateway has just returned, and Prometheus takes a lower counter for a
restart.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from servekit.metrics import METRICS, Metric
from servekit.protocol.control.metrics_messages import Figures, GetMetrics, Series

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from servekit.gateway.api.admin.endpoints import Supervisor
    from servekit.gateway.auth.authorization import Access

PATH = "/metrics"
ANSWER_S = 5.0
#: The least time between two questions of one gateway to the supervisor, however many clients
#: scrape.
ASK_EVERY_S = 0.05

T = TypeVar("T")


class Page(Collector):
    """The metrics at one moment, rendered as text in either format."""

    def __init__(self, series: Iterable[Series]) -> None:
        self._series: defaultdict[str, list[Series]] = defaultdict(list)
        for one in series:
            self._series[one.metric].append(one)
        self._texts: dict[str, bytes] = {}

    def collect(self) -> Iterator[Family]:
        """Return all metrics with names and help texts, including those without a series."""
        return (_family(metric, self._series.get(metric.name, ())) for metric in METRICS)

    async def text(self, accept: str) -> tuple[bytes, str]:
        """Return the page in the format that `accept` prefers, and its content type."""
        encode, content_type = exposition.choose_encoder(accept)
        if content_type not in self._texts:
            # encoding a thousand series takes tens of milliseconds: not on the event loop
            self._texts[content_type] = await asyncio.to_thread(encode, self)
        return self._texts[content_type], content_type


def _family(metric: Metric, series: Iterable[Series]) -> Family:
    family: Any
    if metric.kind == "histogram":
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for one in series:
            *counts, total = one.figures
            family.add_metric(one.labels, list(zip(bounds, accumulate(counts), strict=True)), total)
        return family  # type: ignore[no-any-return]
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for one in series:
        family.add_metric(one.labels, one.figures[0])
    return family  # type: ignore[no-any-return]


class InTurn(Generic[T]):
    """Runs one query at a time; callers that arrive during a query share the next one.

    The answer to a query under way may be older than what another gateway has already returned; the
    answer to the next query is not.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], every_s: float) -> None:
        self._ask = ask
        self._every_s = every_s
        self._last: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None
        self._due_at = 0.0

    async def __call__(self) -> T:
        """Return the answer to a query that starts after this call. Raises the query's errors."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._put(self._last))
            self._next.add_done_callback(_seen)
        return await asyncio.shield(self._next)

    async def _put(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait((before,))
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due_at - loop.time())
        self._last, self._next = self._next, None
        self._due_at = loop.time() + self._every_s
        return await self._ask()


def _seen(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it when every waiter has left."""
    if not task.cancelled():
        task.exception()


def add_metrics(app: FastAPI, supervisor: Supervisor, access: Access) -> None:
    async def ask_supervisor() -> Page:
        return Page((await supervisor.answer_to(GetMetrics(), Figures, ANSWER_S)).series)

    page = InTurn(ask_supervisor, ASK_EVERY_S)

    @app.get(
        PATH,
        tags=["service"],
        summary="Metrics for Prometheus; OpenMetrics if `Accept` prefers it",
        response_class=Response,
        responses={200: {"content": _CONTENT, "description": "The metrics"}, **_REFUSALS},
    )
    async def metrics(request: Request) -> Response:
        """Of the whole instance, whichever gateway answers; `servekit metrics` explains each.

        Where the file has keys this needs one with `metrics` or `admin`, unless
        `server.open_metrics` says otherwise.
        """
        access.require_metrics()
        text, content_type = await (await page()).text(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)


_TEXT = {"schema": {"type": "string"}}
_CONTENT = {"text/plain": _TEXT, "application/openmetrics-text": _TEXT}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "An API key is needed, or this one is not known"},
    403: {"description": "The key has neither `metrics` nor `admin`"},
    429: {"description": "The key's limits are reached; see Retry-After"},
    503: {"description": "The supervisor takes no requests now"},
    504: {"description": "The supervisor did not answer in time"},
}
