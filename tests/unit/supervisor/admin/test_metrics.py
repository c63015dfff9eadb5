"""What the supervisor adds up for /metrics, and how it tells the state of things."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit import metrics
from servekit.protocol.messages import (
    GatewayStatus,
    GpuStatus,
    ModelStatus,
    ReplicaStatus,
    Status,
    Traffic,
)
from servekit.supervisor.admin.metrics import (
    CounterTable,
    MetricsAggregator,
    ProcessCounters,
    of_gpus,
    of_model,
    of_service,
)
from servekit.supervisor.lifecycle.managed_process import ManagedProcess
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.gpu_memory import GpuMemory
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpu.gpus import Gpu

GIB = 2**30
RETRIES, WAIT = "servekit_retries_total", "servekit_queue_wait_seconds"


def sums(book: CounterTable) -> dict[tuple[str, tuple[str, ...]], list[float]]:
    return {(one.metric, one.labels): list(one.figures) for one in book.series()}


def flat(series: Any) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for one in series:
        metric = metrics.BY_NAME[one.metric]
        assert (len(one.figures), len(one.labels)) == (metric.width, len(metric.labels)), one
        key = (one.metric, *one.labels)
        assert key not in found, "a series that is there twice is no page that Prometheus reads"
        found[key] = one.figures[0]
    return found


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5)), max_size=30))
def test_sums_are_of_all_gateways_and_only_grow(told: list[tuple[str, int]]) -> None:
    book = CounterTable()
    last: dict[Any, list[float]] = {}
    for model, count in told:
        book.add_to(RETRIES, (model,), [count])
        now = sums(book)
        assert all(now[key] >= figures for key, figures in last.items())
        last = now
    for model in {model for model, _ in told}:
        assert last[RETRIES, (model,)] == [sum(n for name, n in told if name == model)]


def test_histograms_are_added_figure_by_figure() -> None:
    book, width = CounterTable(), metrics.BY_NAME[WAIT].width
    for _ in range(2):
        book.add_to(WAIT, ("m",), [1.0, *[0.0] * (width - 3), 2.0, 7.5])
    assert sums(book)[WAIT, ("m",)] == [2.0, *[0.0] * (width - 3), 4.0, 15.0]


@pytest.mark.parametrize(
    ("metric", "labels", "figures"),
    [
        ("servekit_of_tomorrow", ("m",), [1.0]),
        (WAIT, ("m",), [1.0]),
        (RETRIES, ("m", "n"), [1.0]),
    ],
)
def test_what_another_version_counts_is_left_out(
    metric: str, labels: tuple[str, ...], figures: list[float]
) -> None:
    book = CounterTable()
    book.add_to(metric, labels, figures)
    assert sums(book) == {}


# ---------------------------------------------------------------- the processes' own counters


class Worker(WorkerProcess):
    """As far as it is read here."""

    def __init__(self, name: str) -> None:
        self.name, self.restarts, self.stalls = name, 0, 0
        self.model = cast(Any, SimpleNamespace(name=name.split("/")[0]))


def restarts(book: CounterTable) -> dict[tuple[str, ...], float]:
    return {
        labels: figures[0]
        for (metric, labels), figures in sums(book).items()
        if metric.endswith("restarts_total")
    }


def test_restarts_go_on_where_a_successor_of_the_same_name_begins() -> None:
    book = CounterTable()
    ledger = ProcessCounters(book)
    old = Worker("m/0")
    ledger.read_counters([old])
    assert restarts(book) == {("m", "m/0"): 0}, "there from the start, so that 1 is an increase"
    old.restarts = 2
    ledger.read_counters([old])
    old.restarts = 3  # between two looks, the last of which does not see it any more
    new = Worker("m/0")
    new.restarts = 1
    ledger.read_counters([new])
    assert restarts(book) == {("m", "m/0"): 4}
    ledger.read_counters([new])
    ledger.read_counters([])
    assert restarts(book) == {("m", "m/0"): 4}


class Door(ManagedProcess[Any]):
    """A gateway, as far as it is read here."""

    command = send_greeting = receive = load = cast(Any, None)

    def __init__(self, name: str) -> None:
        self.name, self.restarts, self.stalls = name, 0, 0


def test_stalls_are_a_workers_and_gateways_have_a_metric_of_their_own() -> None:
    book = CounterTable()
    ledger = ProcessCounters(book)
    worker, gateway = Worker("m/0"), Door("gateway/0")
    ledger.read_counters([worker, gateway])
    worker.stalls, gateway.restarts = 2, 1
    ledger.read_counters([worker, gateway])
    assert sums(book) == {
        ("servekit_worker_restarts_total", ("m", "m/0")): [0],
        ("servekit_worker_stalls_total", ("m", "m/0")): [2],
        ("servekit_gateway_restarts_total", ("gateway/0",)): [1],
    }


# ---------------------------------------------------------------- the state of things


def replica(name: str, state: Any, **more: Any) -> ReplicaStatus:
    return ReplicaStatus(name, state, "", 1, "cpu", **more)


def test_a_model_and_its_workers() -> None:
    workers = (replica("m/0", "ready", running=3, rss_bytes=7), replica("m/1", "backoff"))
    found = flat(of_model(ModelStatus("m", "echo", "m", 0, workers)))
    assert found["servekit_model_ready", "m"] == 1
    assert found["servekit_workers", "m", "ready"] == 1
    assert found["servekit_workers", "m", "backoff"] == 1
    assert found["servekit_workers", "m", "failed"] == 0
    assert found["servekit_worker_running", "m", "m/0"] == 3
    assert found["servekit_process_resident_memory_bytes", "m/0"] == 7


def test_a_model_none_of_whose_workers_is_ready() -> None:
    found = flat(of_model(ModelStatus("m", "echo", "m", 0, (replica("m/0", "loading"),))))
    assert found["servekit_model_ready", "m"] == 0


def test_the_service_itself() -> None:
    gateways = (
        GatewayStatus("gateway/0", 5, "ready", in_flight=4, rss_bytes=9),
        GatewayStatus("gateway/1", 0, "backoff"),
    )
    status = Status("1.2.3", 1, "", "", 1e9, 77, (), gateways, False)
    found = flat(of_service(status))
    assert found["servekit_gateway_up", "gateway/0"] == 1
    assert found["servekit_gateway_up", "gateway/1"] == 0
    assert found["servekit_gateway_in_flight", "gateway/0"] == 4
    assert found["servekit_process_resident_memory_bytes", "supervisor"] == 77
    assert found["servekit_start_time_seconds",] == 1e9
    assert [key[1] for key in found if key[0] == "servekit_build_info"] == ["1.2.3"]


def test_queues_without_a_limit_on_several_gateways_fit_a_message() -> None:
    model = ModelStatus("m", "echo", "p", 0, (), max_queue=2**63 - 1)
    gateway = SimpleNamespace(shares=True, traffic=Traffic(0, 0, {"m": 2}), on_counted=None)
    quarantine = SimpleNamespace(holding=lambda: ())
    parts: Any = [gateway] * 4, None, quarantine, None, None
    series = list(MetricsAggregator(*parts)._of_queues([model]))
    assert flat(series)["servekit_queue_limit", "m"] == 4.0 * (2**63 - 1)
    msgspec.msgpack.encode(series)


def test_memory_of_a_worker_by_device_its_own_and_others() -> None:
    first, second = (Gpu(i, f"GPU-{i}", "H200", 100 * GIB, 100 * GIB) for i in range(2))
    place = Assignment("m", 0, (first,), None, (40 * GIB,))
    memory = GpuMemory(place, (first, second), None, lambda what: None)
    memory.set_pid(1)
    on = ("m", "m/0", "0", "GPU-0", ""), ("m", "m/0", "1", "GPU-1", "")
    held, claimed, stray = (
        f"servekit_worker_gpu_memory_{what}bytes" for what in ("", "claimed_", "stray_")
    )
    memory.update_figures({1: {"GPU-0": 30 * GIB}, 2: {"GPU-1": 5 * GIB}})
    found = flat(of_gpus(("m", "m/0"), memory))
    assert found[held, *on[0]] == 30 * GIB
    assert found[claimed, *on[0]] == 40 * GIB
    assert found[stray, *on[1]] == 0
    memory.update_figures({1: {"GPU-0": 30 * GIB, "GPU-1": GIB}})
    assert flat(of_gpus(("m", "m/0"), memory))[stray, *on[1]] == GIB
    memory.reset_figures()
    found = flat(of_gpus(("m", "m/0"), memory))
    assert (found[held, *on[0]], found[stray, *on[1]]) == (0, 0)


def test_each_gpu_tells_how_full_and_how_busy_it_is() -> None:
    gpus = (
        GpuStatus(0, "GPU-0", "H200", 100 * GIB, 30 * GIB, 0.5),
        GpuStatus(1, "GPU-1", "H200", 100 * GIB, 0, None),
    )
    status = Status("1.2.3", 1, "", "", 1e9, 77, (), (), draining=False, gpus=gpus)
    found = flat(of_service(status))
    used, busy = "servekit_gpu_memory_used_bytes", "servekit_gpu_utilization_ratio"
    assert found[used, "0", "GPU-0", "H200", ""] == 30 * GIB
    assert found[used, "1", "GPU-1", "H200", ""] == 0
    assert {key: value for key, value in found.items() if key[0] == busy} == {
        (busy, "0", "GPU-0", "H200", ""): 0.5  # the other does not tell
    }
