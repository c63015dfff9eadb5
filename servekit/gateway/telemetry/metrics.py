"""A gateway's request counters and histograms for /metrics: one `RequestMeter` per label set.

This is on the hot path: a request looks its meter up once and adds to figures in lists; a streamed
token costs a reading of the clock and two additions. Once a second the counts are sent to the
supervisor, which adds up those of all gateways, and are reset. The lists are reset in place,
because calls in flight hold their meters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING

from servekit import metrics
from servekit.errors import REQUEST_ERRORS, ModelNotFound, RequestError
from servekit.gateway.telemetry.observer import RequestObserver
from servekit.protocol.control.metrics_messages import Counted, Series

if TYPE_CHECKING:
    from servekit.gateway.routing.model_queue import ModelQueue
    from servekit.gateway.routing.request import InflightRequest
    from servekit.gateway.routing.router import Router
    from servekit.gateway.telemetry.tracing import Tracer
    from servekit.protocol.messages import Delta

#: Adapters with a label of their own; further ones share `OTHER`. Clients that may load adapters
#: choose their names, and each label takes memory here, at the supervisor and in Prometheus.
MOST_ADAPTERS = 256
#: The label of those adapters, and of unknown paths.
OTHER = "other"
PROVIDER = "servekit"
#: Names of operations by a request's task; OpenTelemetry's names if it has one.
_OPERATIONS = {"embed": "embeddings", "tokenize": "tokenize", "detokenize": "detokenize"}
#: Successful outcomes of a request; all others are error codes.
_WELL = ("stop", "length")

_first = metrics.FIRST_S
_token = metrics.TOKEN_S
_duration = metrics.DURATION_S
_wait = metrics.WAIT_S
_tokens = metrics.TOKENS

Figures = list[float]


class RequestMeter(RequestObserver):
    """The counters of one model, adapter (or none) and operation.

    Times are of `time.monotonic`, in seconds.
    """

    __slots__ = (
        "_accounts",
        "_again",
        "_durations",
        "_first",
        "_gaps",
        "_labels",
        "_pace",
        "_usage_in",
        "_usage_out",
        "_wait",
        "_well",
    )

    def __init__(self, model: str, adapter: str, operation: str) -> None:
        self._labels = model, adapter, operation
        self._accounts: dict[tuple[str, str], Figures] = {}  # by key and outcome
        self._well = _nothing(_duration)
        self._durations: dict[str, Figures] = dict.fromkeys(_WELL, self._well)  # by outcome
        self._first = _nothing(_first)
        self._pace = _nothing(_token)
        self._gaps = _nothing(_token)
        self._wait = _nothing(_wait)
        self._usage_in = _nothing(_tokens)
        self._usage_out = _nothing(_tokens)
        self._again: Figures = [0.0, 0.0]  # retries, continuations

    @property
    def operation(self) -> str:
        """Return the value of `gen_ai.operation.name`."""
        return self._labels[2]

    # ---- events of a call

    def on_sent(self, call: InflightRequest, *, again: bool) -> None:
        """Record the time in the queue, or a retry or continuation."""
        if again:
            self._again[bool(call.emitted)] += 1
            return
        waited = call.started_s - call.created_s
        self._wait[bisect_left(_wait, waited)] += 1
        self._wait[-1] += waited

    def on_first_token(self, call: InflightRequest) -> None:
        took = call.first_s - call.created_s
        self._first[bisect_left(_first, took)] += 1
        self._first[-1] += took

    def count_tokens(self, took_s: float, streams: int) -> None:
        """Record new tokens of `streams` streams, each `took_s` after the stream's last token."""
        gaps = self._gaps
        gaps[bisect_left(_token, took_s)] += streams
        gaps[-1] += took_s * streams

    def on_ended(self, call: InflightRequest, outcome: str, last: Delta | None) -> None:
        """Record a call's outcome, its duration and its tokens."""
        prompt = call.prompt_tokens
        completion = call.answer_tokens if last is None else last.completion_tokens
        now = monotonic()
        caller = call.caller
        of = "" if caller is None else caller.rule.name, outcome
        account = self._accounts.get(of) or self._open(of)
        account[0] += 1
        account[1] += prompt
        account[2] += call.cached_tokens
        account[3] += completion
        took = now - call.created_s
        durations = self._durations[outcome]
        durations[bisect_left(_duration, took)] += 1
        durations[-1] += took
        if durations is not self._well:
            return
        self._usage_in[bisect_left(_tokens, prompt)] += 1  # their sums: see `pop_counts`
        self._usage_out[bisect_left(_tokens, completion)] += 1
        if completion > 1 and call.first_s:
            pace = (now - call.first_s) / (completion - 1)
            self._pace[bisect_left(_token, pace)] += 1
            self._pace[-1] += pace

    def count_refusal(self, key: str, outcome: str) -> None:
        """Record a request that was refused on arrival."""
        of = key, outcome
        (self._accounts.get(of) or self._open(of))[0] += 1

    def _open(self, of: tuple[str, str]) -> Figures:
        account = self._accounts[of] = [0.0, 0.0, 0.0, 0.0]
        if of[1] not in self._durations:
            self._durations[of[1]] = _nothing(_duration)
        return account

    # ---- reports to the supervisor

    def pop_counts(self) -> Iterator[Series]:
        """Yield the counts since the last call, and reset them."""
        model, adapter, operation = self._labels
        for (key, outcome), account in self._accounts.items():
            if outcome in _WELL:
                self._usage_in[-1] += account[1]
                self._usage_out[-1] += account[3]
            yield from _of_account((model, adapter, key), outcome, account)
        yield from _one("servekit_queue_wait_seconds", (model,), self._wait)
        yield from _one("servekit_inter_token_seconds", (model, adapter), self._gaps)
        retries, continuations = _emptied(self._again)
        yield from _one("servekit_retries_total", (model,), [retries])
        yield from _one("servekit_continuations_total", (model,), [continuations])
        kind = operation, PROVIDER, adapter or model, model
        yield from _one("gen_ai_server_time_to_first_token_seconds", kind, self._first)
        yield from _one("gen_ai_server_time_per_output_token_seconds", kind, self._pace)
        for token_type, figures in (("input", self._usage_in), ("output", self._usage_out)):
            yield from _one("gen_ai_client_token_usage", (*kind, token_type), figures)
        for outcome, figures in self._durations.items():
            error = "" if outcome in _WELL else outcome
            yield from _one("gen_ai_server_request_duration_seconds", (*kind, error), figures)


def _of_account(who: tuple[str, str, str], outcome: str, account: Figures) -> Iterator[Series]:
    requests, prompt, cached, completion = _emptied(account)
    yield from _one("servekit_requests_total", (*who, status_of(outcome), outcome), [requests])
    yield from _one("servekit_prompt_tokens_total", who, [prompt])
    if prompt:  # report zero cached tokens, too
        yield Series("servekit_cached_prompt_tokens_total", who, [cached])
    yield from _one("servekit_completion_tokens_total", who, [completion])


def _one(metric: str, labels: tuple[str, ...], figures: Figures) -> Iterator[Series]:
    """Yield a series with these figures and reset them; yield nothing if all are zero."""
    if any(figures):
        yield Series(metric, labels, _emptied(figures))


def _emptied(figures: Figures) -> Figures:
    """Return a copy of the figures, and reset the original in place, because others hold it."""
    copy = figures[:]
    figures[:] = [0.0] * len(figures)
    return copy


def _nothing(buckets: tuple[float, ...]) -> Figures:
    return [0.0] * (len(buckets) + 2)


def status_of(outcome: str) -> str:
    """Return the HTTP status for the outcome of a request."""
    if outcome in _WELL:
        return "200"
    kind = REQUEST_ERRORS.get(outcome)
    return str(499 if outcome == "cancelled" else 500 if kind is None else kind.status)


#: The meter of calls that no router has accepted; it is never read.
UNMEASURED = RequestMeter("", "", "")


class RequestMetrics:
    """The counts of one gateway that have not been reported yet."""

    def __init__(self) -> None:
        self._meters: dict[tuple[str, str, str], RequestMeter] = {}
        self._adapters: set[str] = set()
        self.tracer: Tracer | None = None
        #: Responses by path and status, counted by the protocol and `ErrorMiddleware`.
        self.answers: defaultdict[tuple[str | bytes, int], int] = defaultdict(int)

    def observe(self, route: ModelQueue, call: InflightRequest) -> None:
        """Set the observers of a call that has been accepted for `route`."""
        call.meter = meter = self._find_meter(route, call)
        call.observers = (meter,)
        if self.tracer is not None:
            call.observers += self.tracer.trace(call, meter.operation)

    def _find_meter(self, route: ModelQueue, call: InflightRequest) -> RequestMeter:
        if route.base is route and not call.more:  # nearly all calls
            of = route.status.name, "", "text_completion" if call.messages is None else "chat"
            return self._meters.get(of) or self._make(*of)
        return self._find_labelled_meter(route, call)

    def count_refusal(self, router: Router, call: InflightRequest, error: RequestError) -> None:
        """Record a call that was refused on arrival."""
        try:
            route = router.find(call.model)
        except ModelNotFound:
            route = None
        caller = router.access.find_caller(call)
        key = "" if caller is None else caller.rule.name
        self._find_labelled_meter(route, call).count_refusal(key, error.code)
        if call.origin is not None:
            call.origin.on_ended(call, error.code, None)

    def _find_labelled_meter(self, route: ModelQueue | None, call: InflightRequest) -> RequestMeter:
        """Return the meter of a call; `route` is None if no model has its name."""
        model = "" if route is None else route.base.status.name
        adapter = "" if route is None or route.base is route else route.status.name
        task = call.more.get("task") if call.more else None
        if task is None:
            operation = "text_completion" if call.messages is None else "chat"
        else:
            operation = _OPERATIONS.get(task, task)
        of = model, adapter, operation
        return self._meters.get(of) or self._make(*of)

    def _make(self, model: str, adapter: str, operation: str) -> RequestMeter:
        if adapter and adapter not in self._adapters:
            if len(self._adapters) >= MOST_ADAPTERS:
                adapter = OTHER
            self._adapters.add(adapter)
        of = model, adapter, operation
        return self._meters.get(of) or self._meters.setdefault(of, RequestMeter(*of))

    def pop_counts(self) -> Counted | None:
        """Return the counts since the last call and reset them; None if there are none."""
        series = [one for meter in self._meters.values() for one in meter.pop_counts()]
        answers = self.answers.copy()
        self.answers.clear()
        for (path, status), count in answers.items():
            route = path if isinstance(path, str) else path.decode("latin-1")
            series.append(Series("servekit_http_requests_total", (route, str(status)), [count]))
        return Counted(tuple(series)) if series else None
