"""Request spans, exported over OTLP with the extra `servekit[otel]` and the key `tracing`.

    chat smollm2            SERVER    the request, from arrival to end
    ├─ queue                INTERNAL  each wait for a worker
    └─ worker smollm2/0     CLIENT    each attempt on a worker
       └─ engine            INTERNAL  from the engine's start of the request to its last token

A trace continues the client's `traceparent` (W3C Trace Context) with its sampling decision. The
worker gets it with the request, and passes it to a remote endpoint. Names and attributes are those
of OpenTelemetry's semantic conventions for generative AI; spans contain no prompts and no answers.
Calls of one HTTP request share a trace.

A sampled request has a `RequestTrace` as one more observer; other requests pay nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import structlog

from servekit import __version__
from servekit.gateway.telemetry.metrics import PROVIDER, RequestMetrics
from servekit.gateway.telemetry.observer import RequestObserver
from servekit.protocol.access import Tracing

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest
    from servekit.protocol.messages import Delta

log: Any = structlog.get_logger("servekit.gateway")

_WELL = ("stop", "length")
#: Time limit of the last export, when the gateway ends.
FLUSH_S = 1.0


class Tracer:
    """Creates spans by the rules of the configuration, and exports them from its own thread."""

    def __init__(self, rules: Tracing, gateway: str) -> None:
        """Start the exporter. Raises ImportError without the extra, as `servekit check` reports."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # an endpoint that is down would be logged every second
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self.rules = rules
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(rules.sample)),
            resource=Resource.create(
                {
                    "service.name": rules.service,
                    "service.version": __version__,
                    "service.instance.id": gateway,
                }
            ),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=_traces(rules.endpoint), timeout=10)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("servekit", __version__)
        self._w3c = TraceContextTextMapPropagator()
        # its thread ends once other rules hold, and the last call that began by these has ended
        weakref.finalize(self, _shut_down, self._provider).atexit = False

    def trace(self, call: InflightRequest, operation: str) -> tuple[RequestTrace, ...]:
        """Begin the trace of a new call; return its observer, none if the call is not sampled."""
        from opentelemetry import trace

        origin = call.origin
        context = None if origin is None else origin.context
        if context is None and origin is not None and origin.traceparent:
            context = self._w3c.extract({"traceparent": origin.traceparent.decode("latin-1")})
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": call.model[:256],
            "servekit.request": "" if origin is None else origin.name,
        } | _request_attributes(call)
        began_ns = _unix_ns(call.created_s)
        root = self._tracer.start_span(
            f"{operation} {call.model[:256]}",
            context,
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=began_ns,
        )
        if origin is not None and origin.context is None:
            origin.context = trace.set_span_in_context(root, context)
        if not root.is_recording():
            return ()
        return (RequestTrace(self, root, began_ns),)

    def span(self, name: str, parent: Any, **more: Any) -> Any:
        """Start a span under `parent`."""
        from opentelemetry import trace

        return self._tracer.start_span(name, trace.set_span_in_context(parent), **more)

    def close(self) -> None:
        """Export the remaining spans; blocks for at most FLUSH_S."""
        # in a thread: force_flush() takes as long as its export, whatever time it is given
        flushing = threading.Thread(target=self._provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


def _shut_down(provider: Any) -> None:
    """Export the remaining spans, and end the exporter's thread, in another one."""
    threading.Thread(target=provider.shutdown, daemon=True).start()


def apply_rules(measures: RequestMetrics, rules: Tracing, gateway: str) -> None:
    """Adopt these tracing rules."""
    now = measures.tracer
    if rules == (Tracing() if now is None else now.rules):
        return
    try:
        measures.tracer = Tracer(rules, gateway) if rules.endpoint else None
    except ImportError as error:
        measures.tracer = None
        log.error("tracing_unavailable", error=str(error))


class RequestTrace(RequestObserver):
    """The spans of one sampled call."""

    __slots__ = ("_attempt", "_queue", "_root", "_tracer")

    def __init__(self, tracer: Tracer, root: Any, began_ns: int) -> None:
        self._tracer = tracer
        self._root = root
        self._attempt: Any = None
        self._queue: Any = tracer.span("queue", root, start_time=began_ns)

    def on_sent(self, call: InflightRequest, *, again: bool) -> None:
        """End the queue span, and start the attempt's, which the worker continues."""
        from opentelemetry.trace import SpanKind

        if self._queue is not None:
            self._queue.end()
            self._queue = None
        name = "" if call.replica is None else call.replica.name
        attributes = {"servekit.worker": name, "servekit.continued_tokens": len(call.emitted)}
        self._attempt = self._tracer.span(
            f"worker {name}", self._root, kind=SpanKind.CLIENT, attributes=attributes
        )
        of = self._attempt.get_span_context()
        call.trace = f"00-{of.trace_id:032x}-{of.span_id:016x}-{of.trace_flags:02x}"

    def on_requeued(self, call: InflightRequest) -> None:
        """End the attempt's span with an error, and start a new queue span."""
        self._fail(self._attempt, "worker_lost")
        self._attempt = None
        self._queue = self._tracer.span("queue", self._root)

    def on_first_token(self, call: InflightRequest) -> None:
        self._root.add_event("first token")

    def _add_engine_span(self, times_ns: tuple[int, ...]) -> None:
        """Create the engine's span from the times of its start, first token and last token."""
        if len(times_ns) != 4 or self._attempt is None:
            return
        _, given, first, ended = times_ns
        span = self._tracer.span("engine", self._attempt, start_time=given)
        span.add_event("first token", timestamp=first)
        span.end(end_time=ended)

    def on_ended(self, call: InflightRequest, outcome: str, last: Delta | None) -> None:
        """End all spans, with the usage and the outcome."""
        if last is not None:
            self._add_engine_span(last.times_ns)
        completion = call.answer_tokens if last is None else last.completion_tokens
        well = outcome in _WELL
        for span in (self._queue, self._attempt):
            if span is not None:
                self._end(span, "" if well else outcome)
        root = self._root
        root.set_attribute("gen_ai.usage.input_tokens", call.prompt_tokens)
        root.set_attribute("gen_ai.usage.output_tokens", completion)
        if call.cached_tokens:
            root.set_attribute("gen_ai.usage.cache_read.input_tokens", call.cached_tokens)
        if well:
            root.set_attribute("gen_ai.response.finish_reasons", (outcome,))
        self._end(root, "" if well else outcome)

    def _end(self, span: Any, error: str) -> None:
        if error:
            self._fail(span, error)
        else:
            span.end()

    def _fail(self, span: Any, error: str) -> None:
        from opentelemetry.trace import StatusCode

        if span is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
            span.end()


def _request_attributes(call: InflightRequest) -> dict[str, Any]:
    params = call.params
    asked = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.seed": params.seed,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _unix_ns(monotonic_s: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def _traces(endpoint: str) -> str:
    """Return the URL for spans of an OTLP endpoint, given with or without its path."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"
