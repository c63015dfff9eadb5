"""The metrics of /metrics: names, labels and meanings. `servekit metrics` prints them.

Names follow Prometheus: base units, `_total` for counters. Metrics that OpenTelemetry's semantic
conventions for generative AI define keep the conventional names, attributes (as labels) and
bucket boundaries, as a collector would translate them for Prometheus. Some boundaries are added
for CPUs and small models.

Gateways count requests in `gateway.telemetry.metrics`; `supervisor.admin.metrics` adds them up and
measures the state of the service; `gateway.api.admin.metrics` renders the page.
Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

#: Bucket bounds of request durations, s.
DURATION_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    *(163.84, 327.68, 655.36),
)
#: Bucket bounds of TTFT, s.
FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0),
)
#: Bucket bounds of inter-token latency, s.
TOKEN_S = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 10.0, 30.0),
)
#: Bucket bounds of queue waits, s.
WAIT_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(float(4**n) for n in range(14))

#: Labels of the generative AI metrics.
_GEN_AI = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
)
_WORKER = ("model", "worker")
_GPU = (*_WORKER, "gpu", "uuid", "node")
_DEVICE = ("gpu", "uuid", "name", "node")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `buckets` are the upper bounds of a histogram's buckets, without infinity.

    A counter of rare events `starts_at_zero` for every model, so that its first increment is an
    increase.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    starts_at_zero: bool = False

    @property
    def width(self) -> int:
        """Return the number of figures per series; a histogram has buckets, overflow and sum."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1


def _counter(
    name: str, labels: Sequence[str], help: str, *, starts_at_zero: bool = False
) -> Metric:
    return Metric(name, "counter", tuple(labels), help, starts_at_zero=starts_at_zero)


def _gauge(name: str, labels: Sequence[str], help: str) -> Metric:
    return Metric(name, "gauge", tuple(labels), help)


def _histogram(name: str, labels: Sequence[str], buckets: Sequence[float], help: str) -> Metric:
    return Metric(name, "histogram", tuple(labels), help, tuple(buckets))


_REQUEST = ("model", "adapter", "key")

#: All metrics, in the order of the page.
METRICS: tuple[Metric, ...] = (
    # ---- requests
    _counter(
        "servekit_requests_total",
        (*_REQUEST, "status", "outcome"),
        "Requests to models that have ended, or were refused. `outcome` is stop, length, or an"
        " error's code, `status` the HTTP status that goes with it. Each prompt and choice"
        " counts. `adapter` is the adapter or preset that was asked for, `key` the name of an API"
        " key; `model` is empty if no model has the name.",
    ),
    _counter(
        "servekit_http_requests_total",
        ("route", "status"),
        "HTTP requests by path and status; unknown paths are `other`.",
    ),
    _counter(
        "servekit_prompt_tokens_total", _REQUEST, "Tokens of prompts, including those from a cache."
    ),
    _counter(
        "servekit_cached_prompt_tokens_total",
        _REQUEST,
        "Tokens of prompts that came from an engine's prefix cache.",
    ),
    _counter(
        "servekit_completion_tokens_total",
        _REQUEST,
        "Tokens of answers, including answers that were broken off.",
    ),
    _histogram(
        "gen_ai_server_time_to_first_token_seconds",
        _GEN_AI,
        FIRST_S,
        "Time from a request's arrival to its first token at the gateway, waiting included.",
    ),
    _histogram(
        "gen_ai_server_time_per_output_token_seconds",
        _GEN_AI,
        TOKEN_S,
        "Time per output token after the first, of each successful request.",
    ),
    _histogram(
        "gen_ai_server_request_duration_seconds",
        (*_GEN_AI, "error_type"),
        DURATION_S,
        "Time from a request's arrival to its end; `error_type` is an error's code, or empty."
        " Requests that were refused on arrival do not count.",
    ),
    _histogram(
        "gen_ai_client_token_usage",
        (*_GEN_AI, "gen_ai_token_type"),
        TOKENS,
        "Input and output tokens of each successful request.",
    ),
    _histogram(
        "servekit_inter_token_seconds",
        ("model", "adapter"),
        TOKEN_S,
        "Time between the tokens of two engine steps of a streamed answer, including interruptions"
        " by a worker's death.",
    ),
    # ---- the queue
    _histogram(
        "servekit_queue_wait_seconds",
        ("model",),
        WAIT_S,
        "Time from a request's arrival until it is first sent to a worker.",
    ),
    _gauge("servekit_queue_depth", ("model",), "Waiting requests, at all gateways."),
    _gauge(
        "servekit_queue_limit",
        ("model",),
        "Limit of waiting requests, beyond which requests get 429: `max_queue` times gateways.",
    ),
    # ---- what survives a worker's death
    _counter(
        "servekit_retries_total",
        ("model",),
        "Requests sent to another worker from their beginning: the first had died, or was ending.",
        starts_at_zero=True,
    ),
    _counter(
        "servekit_continuations_total",
        ("model",),
        "Partial answers continued by another worker, from the last token.",
        starts_at_zero=True,
    ),
    _counter(
        "servekit_quarantines_total",
        ("model",),
        "Requests that were given up because workers died each time they ran them.",
        starts_at_zero=True,
    ),
    _gauge(
        "servekit_quarantined_requests",
        ("model",),
        "Different requests that are refused now because they are quarantined.",
    ),
    # ---- models and their workers
    _gauge("servekit_model_ready", ("model",), "1 while a worker of the model is ready, else 0."),
    _gauge(
        "servekit_model_residency",
        ("model", "tier"),
        "Tier of a model that is loaded and unloaded: 1 for its current tier.",
    ),
    _gauge("servekit_workers", ("model", "state"), "Workers by their current state."),
    _gauge(
        "servekit_replicas",
        ("model", "state"),
        "Replicas of a model that scales: `ready` and `desired`, between `min` and `max`.",
    ),
    _gauge("servekit_worker_slots", _WORKER, "Requests that the worker's engine runs at once."),
    _gauge(
        "servekit_worker_running",
        _WORKER,
        "Requests in the worker's engine, as the engine reports.",
    ),
    _gauge(
        "servekit_worker_waiting", _WORKER, "Requests that the worker has and that do not run yet."
    ),
    _gauge(
        "servekit_kv_cache_usage_ratio", _WORKER, "Share of the worker's KV cache in use, 0 to 1."
    ),
    _counter("servekit_worker_restarts_total", _WORKER, "Starts of the worker after the first."),
    _counter(
        "servekit_worker_stalls_total",
        _WORKER,
        "Kills of the worker because it made no progress, or did not answer.",
    ),
    _gauge(
        "servekit_breaker_state",
        ("model", "state"),
        "Circuit breaker of the model: 1 for its state: closed (normal), open or half-open.",
    ),
    _gauge("servekit_adapters", ("model", "state"), "Adapters by their current state."),
    _counter(
        "servekit_spec_decode_num_draft_tokens_total",
        _WORKER,
        "Tokens that speculative decoding has proposed in the worker's process.",
    ),
    _counter(
        "servekit_spec_decode_num_accepted_tokens_total",
        _WORKER,
        "Proposed tokens that the model has accepted.",
    ),
    # ---- GPUs
    _gauge(
        "servekit_worker_gpu_memory_bytes",
        _GPU,
        "Memory that a worker holds on each of its GPUs, by NVML, read every 5 s. `gpu` is the "
        "index, `node` the address of its machine if that is another one.",
    ),
    _gauge(
        "servekit_worker_gpu_memory_claimed_bytes",
        _GPU,
        "Memory reserved for the worker on the GPU, if its model has a claim.",
    ),
    _gauge(
        "servekit_worker_gpu_memory_stray_bytes",
        _GPU,
        "Memory that the worker holds on GPUs that are not its own: 0 is normal.",
    ),
    _gauge("servekit_gpu_memory_total_bytes", _DEVICE, "Memory of each GPU."),
    _gauge(
        "servekit_gpu_memory_used_bytes",
        _DEVICE,
        "Memory of each GPU in use, by workers and by others; read every 5 s.",
    ),
    _gauge(
        "servekit_gpu_utilization_ratio",
        _DEVICE,
        "Share of the last moments with a kernel running, 0 to 1, if the GPU reports it.",
    ),
    # ---- the service itself
    _gauge("servekit_gateway_up", ("gateway",), "1 while the gateway serves, else 0."),
    _gauge(
        "servekit_gateway_in_flight", ("gateway",), "Waiting and running requests of each gateway."
    ),
    _counter(
        "servekit_gateway_restarts_total", ("gateway",), "Starts of the gateway after the first."
    ),
    _gauge(
        "servekit_process_resident_memory_bytes",
        ("process",),
        "Resident memory of the supervisor, of each gateway and of each worker.",
    ),
    _gauge("servekit_start_time_seconds", (), "Start time of the instance, as Unix time."),
    _gauge("servekit_build_info", ("version", "python"), "1; the versions are labels."),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def metrics_reference() -> str:
    """Return all metrics as a Markdown table."""
    rows = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)
