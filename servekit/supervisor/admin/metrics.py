"""Aggregation for /metrics: the counters of all gateways, and gauges of the present state.

Gateways report the growth of their counters and the sums are kept here, so a gateway that dies
loses at most its last second of counts. Supervised processes have their own counters
(`ManagedProcess.restarts`). Their growth is summed, too, because a reload starts new processes that
may have the names of old ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from servekit import metrics
from servekit.protocol.adapters import AdapterState
from servekit.protocol.control.metrics_messages import Counted, Figures, GetMetrics, Series
from servekit.protocol.messages import ModelStatus, Status, WorkerState
from servekit.protocol.residency import Residency
from servekit.supervisor.deployments.deployment_manager import DeploymentManager
from servekit.supervisor.gateway_process import Gateway
from servekit.supervisor.lifecycle.managed_process import ManagedProcess
from servekit.supervisor.lifecycle.restart_policy import BreakerState
from servekit.supervisor.quarantine import Quarantine
from servekit.supervisor.usage_ledger import UsageLedger
from servekit.supervisor.workers.gpu_memory import GpuMemory
from servekit.supervisor.workers.worker_process import WorkerProcess

Labels = tuple[str, ...]

_STATES: tuple[WorkerState, ...] = get_args(WorkerState)
_BREAKER: tuple[BreakerState, ...] = get_args(BreakerState)
_ADAPTER: tuple[AdapterState, ...] = get_args(AdapterState)
_TIERS: tuple[Residency, ...] = get_args(Residency)
_FROM_ZERO = [metric.name for metric in metrics.METRICS if metric.starts_at_zero]


class CounterTable:
    """Sums by metric and labels, which only grow."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Labels], list[float]] = {}

    def add_to(self, metric: str, labels: Labels, figures: Sequence[float]) -> None:
        """Add to a sum, ignoring metrics and shapes that only another version knows."""
        known = metrics.BY_NAME.get(metric)
        if known is None or (known.width, len(known.labels)) != (len(figures), len(labels)):
            return
        sums = self._sums.setdefault((metric, labels), [0.0] * len(figures))
        for at, figure in enumerate(figures):
            sums[at] += figure

    def series(self) -> Iterator[Series]:
        for (metric, labels), sums in self._sums.items():
            yield Series(metric, labels, sums)


class ProcessCounters:
    """The counters of the supervised processes, across their restarts and replacements."""

    def __init__(self, book: CounterTable) -> None:
        self._book = book
        self._seen: dict[ManagedProcess[Any], tuple[int, int]] = {}

    def read_counters(self, lives: Iterable[ManagedProcess[Any]]) -> None:
        """Read the counters of current processes, and a last time those of the previous ones."""
        now = dict.fromkeys(lives)
        for life in {**self._seen, **now}:
            self._note(life)
        self._seen = {life: self._seen[life] for life in now}

    def _note(self, life: ManagedProcess[Any]) -> None:
        restarts, stalls = self._seen.get(life, (0, 0))
        if isinstance(life, WorkerProcess):
            worker = life.model.name, life.name
            self._book.add_to("servekit_worker_restarts_total", worker, [life.restarts - restarts])
            self._book.add_to("servekit_worker_stalls_total", worker, [life.stalls - stalls])
        else:
            gateway = (life.name,)
            self._book.add_to(
                "servekit_gateway_restarts_total", gateway, [life.restarts - restarts]
            )
        self._seen[life] = life.restarts, life.stalls


class MetricsAggregator:
    """Aggregator of everything that /metrics shows. `status` returns the state of the instance."""

    def __init__(
        self,
        gateways: Sequence[Gateway],
        deployments: DeploymentManager,
        quarantine: Quarantine,
        status: Callable[[], Status],
        usage: UsageLedger,
    ) -> None:
        self._usage = usage
        self._gateways = gateways
        self._deployments = deployments
        self._quarantine = quarantine
        self._status = status
        self._book = CounterTable()
        self._ledger = ProcessCounters(self._book)
        for gateway in gateways:
            gateway.on_counted = self.counted

    def counted(self, counted: Counted) -> None:
        """Add the counts that a gateway reports since its last report."""
        self._usage.add(counted.series)
        for one in counted.series:
            self._book.add_to(one.metric, one.labels, one.figures)

    def count_events(self) -> None:
        """Count the events of the processes; call this often."""
        self._ledger.read_counters([*self._gateways, *self._deployments.replicas()])

    def answer_metrics(self, request: GetMetrics) -> Figures:
        self.count_events()
        status = self._status()
        for model in status.models:
            for metric in _FROM_ZERO:
                self._book.add_to(metric, (model.name,), [0])
        # a draining model may have a successor of its name, and series must be unique
        now = {(one.metric, one.labels): one for one in self._gauge_series(status)}
        return Figures((*self._book.series(), *now.values()))

    def _gauge_series(self, status: Status) -> Iterator[Series]:
        """Yield the gauges."""
        for model in reversed(status.models):  # draining models come last there
            yield from of_model(model)
        yield from self._of_queues(status.models)
        yield from self._deployment_series()
        yield from of_service(status)

    def _of_queues(self, models: Sequence[ModelStatus]) -> Iterator[Series]:
        held = [request.model for request in self._quarantine.holding()]
        for model in models:
            who = (model.name,)
            waiting = sum(one.traffic.queued.get(model.name, 0) for one in self._gateways)
            yield Series("servekit_queue_depth", who, [waiting])
            # the sum may be of more than 64 bits, which an integer of a message may not
            limit = float(model.max_queue) * sum(one.shares for one in self._gateways)
            yield Series("servekit_queue_limit", who, [limit])
            yield Series("servekit_quarantined_requests", who, [held.count(model.name)])

    def _deployment_series(self) -> Iterator[Series]:
        for deployment in reversed(self._deployments.all_deployments()):
            name = deployment.model.name
            yield from _one_of("servekit_breaker_state", name, _BREAKER, deployment.circuit.state)
        for replica in self._deployments.replicas():
            who = replica.model.name, replica.name
            last = replica.liveness.last
            yield Series("servekit_kv_cache_usage_ratio", who, [last.kv_used])
            if drafts := last.draft_tokens:
                yield Series("servekit_spec_decode_num_draft_tokens_total", who, [drafts])
                accepted = last.accepted_tokens
                yield Series("servekit_spec_decode_num_accepted_tokens_total", who, [accepted])
            yield from of_gpus(who, replica.gpu)
        for gpu in self._deployments.gpus:
            labels = str(gpu.index), gpu.uuid, gpu.name, gpu.node
            yield Series("servekit_gpu_memory_total_bytes", labels, [gpu.total_bytes])


def of_gpus(who: tuple[str, str], memory: GpuMemory) -> Iterator[Series]:
    """Yield the GPU memory of a worker; `who` is the names of its model and itself."""
    there = {gpu.uuid: (*who, str(gpu.index), gpu.uuid, gpu.node) for gpu in memory.gpus}
    for uuid, claim in memory.claims.items():
        where = there.get(uuid, (*who, "", uuid, ""))
        held = memory.by_gpu.get(uuid, 0)
        yield Series("servekit_worker_gpu_memory_bytes", where, [held])
        if claim:
            yield Series("servekit_worker_gpu_memory_claimed_bytes", where, [claim])
    for uuid, where in there.items():
        if uuid not in memory.claims:
            stray = memory.stray_by_gpu.get(uuid, 0)
            yield Series("servekit_worker_gpu_memory_stray_bytes", where, [stray])


def of_model(model: ModelStatus) -> Iterator[Series]:
    """Yield the state of a model and its workers."""
    name = model.name
    states = [replica.state for replica in model.replicas]
    yield Series("servekit_model_ready", (name,), [float("ready" in states)])
    for state in _STATES:
        yield Series("servekit_workers", (name, state), [states.count(state)])
    if model.residence is not None:
        yield from _one_of("servekit_model_residency", name, _TIERS, model.residence.tier)
    if (scale := model.scale) is not None:
        counts = {"ready": states.count("ready"), "desired": scale.desired}
        for what, count in {**counts, "min": scale.min, "max": scale.max}.items():
            yield Series("servekit_replicas", (name, what), [count])
    adapters = [adapter.state for adapter in model.adapters]
    for one in _ADAPTER if adapters else ():
        yield Series("servekit_adapters", (name, one), [adapters.count(one)])
    for replica in model.replicas:
        who = name, replica.name
        yield Series("servekit_worker_running", who, [replica.running])
        yield Series("servekit_worker_waiting", who, [replica.waiting])
        if model.info is not None:
            yield Series("servekit_worker_slots", who, [model.info.slots])
        yield _resident(replica.name, replica.rss_bytes)


def of_service(status: Status) -> Iterator[Series]:
    """Yield the state of gateways, GPUs and the supervisor, and the build information."""
    for gateway in status.gateways:
        who = (gateway.name,)
        yield Series("servekit_gateway_up", who, [float(gateway.state == "ready")])
        yield Series("servekit_gateway_in_flight", who, [gateway.in_flight])
        yield _resident(gateway.name, gateway.rss_bytes)
    for gpu in status.gpus:
        which = str(gpu.index), gpu.uuid, gpu.name, gpu.node
        if gpu.node:  # the GPUs of this machine have this series already
            yield Series("servekit_gpu_memory_total_bytes", which, [gpu.total_bytes])
        yield Series("servekit_gpu_memory_used_bytes", which, [gpu.used_bytes])
        if gpu.utilisation is not None:
            yield Series("servekit_gpu_utilization_ratio", which, [gpu.utilisation])
    yield _resident("supervisor", status.rss_bytes)
    yield Series("servekit_start_time_seconds", (), [status.started_at])
    python = ".".join(map(str, sys.version_info[:3]))
    yield Series("servekit_build_info", (status.version, python), [1])


def _resident(process: str, size_bytes: int) -> Series:
    return Series("servekit_process_resident_memory_bytes", (process,), [size_bytes])


def _one_of(metric: str, model: str, names: Iterable[str], now: str) -> Iterator[Series]:
    """Yield 1 for the current state and 0 for the others."""
    return (Series(metric, (model, name), [float(name == now)]) for name in names)
