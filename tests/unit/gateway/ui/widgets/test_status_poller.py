"""Figures and events of the dashboard: true, and bounded however long it is watched."""

from __future__ import annotations

import asyncio
import bisect
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.gateway.api.admin.endpoints import Supervisor
from servekit.gateway.routing.router import Router
from servekit.gateway.ui.pages.language import SAY_ENGLISH, Say
from servekit.gateway.ui.widgets import machine_tables
from servekit.gateway.ui.widgets.metrics_history import (
    BOUNDS_S,
    FIRST,
    Sample,
    compute_rates,
    make_sample,
    median_s,
)
from servekit.gateway.ui.widgets.model_table import render_models
from servekit.gateway.ui.widgets.stat_cards import render_figures
from servekit.gateway.ui.widgets.status_poller import (
    ASK_AT_REST_S,
    ASK_EVERY_S,
    ASK_SELDOM_S,
    EVERY_S,
    HAPPENINGS,
    SPAN_S,
    Happening,
    StatusPoller,
    list_changes,
)
from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.control.admin_messages import ModelTraffic
from servekit.protocol.control.metrics_messages import Figures, Series
from servekit.protocol.messages import (
    GatewayStatus,
    GetStatus,
    GpuStatus,
    ModelStatus,
    ReplicaStatus,
    Status,
    Topology,
)
from tests.passing_time import Clock, passing_time
from tests.unit.gateway.conftest import Service


def watch_of(router: Router, path: Path | None = None) -> StatusPoller:
    return StatusPoller(router, Supervisor(path, router.access))


def replica(state: Any = "ready", **fields: Any) -> ReplicaStatus:
    return ReplicaStatus("m/0", state, "/nowhere.sock", 1, "cpu", **fields)


def model(*replicas: ReplicaStatus, **fields: Any) -> dict[str, ModelStatus]:
    return {"m": ModelStatus("m", "echo", "-", 0, replicas, **fields)}


# ---------------------------------------------------------------- figures


def histogram(*firsts_s: float) -> Series:
    counts = [0.0] * (len(BOUNDS_S) + 1)
    for first_s in firsts_s:
        counts[bisect.bisect_left(BOUNDS_S, first_s)] += 1
    return Series(FIRST, ("chat", "servekit", "m", "m"), [*counts, sum(firsts_s)])


GPU = GpuStatus(3, "GPU-3", "H200", 100, 25, 0.5)
GATEWAYS = (
    GatewayStatus("gateway/0", 1, "ready", 0, requests=5, in_flight=4),
    GatewayStatus("gateway/1", 2, "ready", 0, requests=7, in_flight=3),
)


def instance(tokens: int = 0, **fields: Any) -> Status:
    given: dict[str, Any] = {"models": tuple(model(replica(restarts=2)).values())} | fields
    traffic = (ModelTraffic("m", 2, tokens), ModelTraffic("n", 0, 1))
    return Status(
        "0", 1, "http://x", "f", 0.0, 0, given["models"], GATEWAYS, False,
        gpus=(GPU, replace(GPU, index=4, utilisation=None)), traffic=traffic,
    )  # fmt: skip


def test_a_sample_is_of_all_gateways() -> None:
    one = make_sample(
        9.0, instance(40), [histogram(0.1), histogram(0.2, 0.3), Series("x", (), [1.0])]
    )
    assert (one.at, one.tokens, one.running, one.waiting, one.queued) == (
        *(9.0, 41, 5, {"m": 2, "n": 0}, 2),
    )
    assert (one.restarts, one.busy, one.used) == (
        *(2, {("", 3): 0.5}, {("", 3): 0.25, ("", 4): 0.25}),
    )
    assert sum(one.firsts) == 3


def test_rates_are_of_some_seconds() -> None:
    found = [Sample(float(at), tokens=tokens) for at, tokens in enumerate((0, 10, 10, 10, 40, 50))]
    assert compute_rates(found)[:2] == [0.0, 10.0]
    assert compute_rates(found)[-1] == 10.0
    assert compute_rates([]) == []
    assert compute_rates([Sample(0.0, tokens=9), Sample(2.0, tokens=0)]) == [
        0.0,
        0.0,
    ]  # never below


def test_a_clock_that_is_set_back_begins_the_figures_anew(service: Service) -> None:
    watch = watch_of(service.router)
    for at in (100.0, 102.0, 3.0, 5.0):
        watch.add_sample(Sample(at, tokens=int(at)))
    assert [one.at for one in watch.samples] == [3.0, 5.0]


def test_figures_are_of_the_last_minutes_though_nobody_looked_before(service: Service) -> None:
    watch, now = watch_of(service.router), time.time()
    for ago_s in range(3600, -1, -int(ASK_AT_REST_S)):
        busy = 9000 * min(3600 - ago_s, 60)  # for one minute, an hour ago
        watch.add_sample(Sample(now - ago_s, tokens=busy, waiting={"m": ago_s // 3600}))
    page = render_figures(list(watch.samples), None, SAY_ENGLISH)
    assert "9k" not in page
    assert "10k" not in page
    assert page.count("<b>–</b>") == 5  # what is not known while the supervisor does not answer


@pytest.mark.parametrize(
    ("firsts_s", "least_s", "most_s"),
    [((0.0001,), 0, 0.001), ((0.03,), 0.02, 0.04), ((0.03, 0.03, 9.0), 0.02, 0.04),
     ((0.03, 1.5, 9.0), 1.0, 2.5), ((0.03, 0.3), 0.02, 0.04), ((1000.0,), 160, 160)],
)  # fmt: skip
def test_the_median_lies_in_its_bucket(
    firsts_s: tuple[float, ...], least_s: float, most_s: float
) -> None:
    before = make_sample(0.0, instance(), [histogram(5.0, 5.0, 5.0)])
    now = make_sample(1.0, instance(), [histogram(5.0, 5.0, 5.0, *firsts_s)])
    found_s = median_s(before, now)
    assert found_s is not None
    assert least_s <= found_s <= most_s
    assert median_s(now, now) is None


async def test_a_day_of_looking_keeps_five_minutes(service: Service) -> None:
    await service.up()
    watch = watch_of(service.router)
    for at in range(3 * int(SPAN_S)):
        restarted = replica(restarts=at)
        watch._before = model(restarted)
        watch.happenings.extend(list_changes(model(replica()), model(restarted), float(at)))
        watch.record_changes()
        watch.samples.append(make_sample(time.time(), instance(at), [histogram(0.1)]))
    assert len(watch.samples) == SPAN_S / ASK_EVERY_S
    assert len(watch.happenings) == HAPPENINGS
    page = machine_tables.render_events(list(watch.happenings), SAY_ENGLISH)
    assert page.count("<li") == machine_tables.SHOWN_HAPPENINGS
    assert len(render_figures(list(watch.samples), None, SAY_ENGLISH)) < 60_000


def test_gpus_and_queues_have_plots_where_there_are_some() -> None:
    found = [make_sample(time.time() - ago_s, instance(), []) for ago_s in (4.0, 2.0, 0.0)]
    page = render_figures(found, instance(), SAY_ENGLISH)
    for label in ("GPUs busy. now 50 %", "GPU memory in use. GPU 3: now 25 %", "Waiting by model"):
        assert label in page
    assert "Restarts of workers. now 2" in page
    assert page.count("<figure") == 7
    bare = render_figures([Sample(time.time())], None, SAY_ENGLISH)
    assert bare.count("<figure") == 4
    assert "GPU" not in bare


async def test_without_a_supervisor_the_page_goes_on(tmp_path: Path) -> None:
    router = Router("gateway/test")
    watch = watch_of(router, tmp_path / "nobody.sock")
    assert await watch.recent_status() is None
    watch.record_changes()
    assert "Tokens" in render_figures(list(watch.samples), None, SAY_ENGLISH)


class Answering:
    """A supervisor that answers, and the times at which its status was asked for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.asked: list[float] = []

    async def answer_to(self, question: Any, kind: Any, limit_s: float) -> Any:
        if isinstance(question, GetStatus):
            self.asked.append(self.clock())
            return instance()
        return Figures(())


@pytest.fixture
async def asking() -> AsyncIterator[tuple[StatusPoller, Answering]]:
    with passing_time() as clock:
        watch = StatusPoller(Router("gateway/0"), Answering(clock))  # type: ignore[arg-type]
        polling = asyncio.create_task(watch.poll())
        await clock.pass_time(2 * ASK_AT_REST_S)
        yield watch, watch.supervisor  # type: ignore[misc]
        polling.cancel()


async def test_at_rest_it_asks_once_a_minute_and_sleeps_between(
    asking: tuple[StatusPoller, Answering],
) -> None:
    _, supervisor = asking
    supervisor.asked.clear()
    supervisor.clock.wakes.clear()
    await supervisor.clock.pass_time(100 * ASK_AT_REST_S)
    assert len(supervisor.asked) == pytest.approx(100, abs=1)
    assert len(supervisor.clock.wakes) <= 101


async def test_news_is_seen_within_a_second_and_what_follows_is_in_the_figures(
    asking: tuple[StatusPoller, Answering],
) -> None:
    watch, supervisor = asking
    await supervisor.clock.pass_time(ASK_SELDOM_S + 1)
    supervisor.asked.clear()
    began_s = supervisor.clock()
    for state in ("loading", "ready"):
        watch.router.apply_topology(Topology(tuple(model(replica(state)).values())))
        await supervisor.clock.pass_time(2 * EVERY_S)
    assert [one.kind for one in watch.happenings] == ["state.loading", "state.ready"]
    assert [at <= began_s + 1.1 * EVERY_S for at in supervisor.asked] == [True]
    await supervisor.clock.pass_time(ASK_SELDOM_S)
    assert len(supervisor.asked) == 2
    supervisor.asked.clear()
    for _ in range(20):  # a dashboard is open
        await watch.recent_status()
        await supervisor.clock.pass_time(ASK_EVERY_S)
    assert len(supervisor.asked) == pytest.approx(20, abs=1)
    supervisor.asked.clear()
    await supervisor.clock.pass_time(10 * ASK_AT_REST_S)
    assert len(supervisor.asked) <= 14  # a few as if it were open, and once after it


# ---------------------------------------------------------------- events


def kinds(before: dict[str, ModelStatus], now: dict[str, ModelStatus]) -> list[tuple[str, str]]:
    return [(one.kind, one.detail) for one in list_changes(before, now, 0.0)]


def test_a_death_is_told_with_its_reason_even_if_it_is_back_already() -> None:
    back = model(replica(restarts=1, reason="killed by SIGKILL"))
    assert kinds(model(replica()), back) == [("died", "killed by SIGKILL")]
    waiting = model(replica("backoff", restarts=1, reason="exit code 1"))
    assert kinds(model(replica()), waiting) == [
        ("died", "exit code 1"),
        ("state.backoff", "exit code 1"),
    ]


def test_states_models_and_adapters_that_come_and_go() -> None:
    assert kinds({}, model(replica("loading"))) == [("state.loading", "")]
    assert kinds(model(replica("loading")), model(replica())) == [("state.ready", "")]
    assert kinds(model(replica()), {}) == [("gone", "")]
    assert kinds(model(replica()), model(replica())) == []
    troubled = model(replica(trouble="the endpoint is down"))
    assert kinds(model(replica()), troubled) == [("trouble", "the endpoint is down")]
    loading = model(replica(), adapters=(AdapterStatus("sql", "/sql", "loading"),))
    serving = model(replica(), adapters=(AdapterStatus("sql", "/sql", "serving"),))
    assert kinds(model(replica()), loading) == [("adapter.loading", "")]
    assert kinds(loading, serving) == [("adapter.serving", "")]
    assert kinds(serving, model(replica())) == [("gone", "")]


def test_a_change_that_was_pushed_is_newer_than_an_answer() -> None:
    from servekit.gateway.ui.pages.dashboard import refresh_model  # it imports gradio, for seconds

    [told] = model(replica(rss_bytes=9, restarts=0)).values()
    [same] = model(replica(rss_bytes=1)).values()
    [died] = model(replica("backoff", restarts=1, reason="SIGKILL")).values()
    assert refresh_model(told, same) == told
    assert refresh_model(told, died).replicas == died.replicas
    assert refresh_model(told, None) == told


def test_what_workers_say_is_data() -> None:
    bad = "\x1b[2J<script>x</script>\u202e" + "w" * 10_000
    html = machine_tables.render_events([Happening(time.time(), "m<b>", "died", bad)], SAY_ENGLISH)
    html += machine_tables.render_workers(
        list(model(replica("failed", reason=bad)).values()), SAY_ENGLISH
    )
    assert "<script" not in html
    assert "<b>m<b>" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert len(html) < 5000


def test_an_event_of_another_day_has_its_date() -> None:
    day, now = 24 * 3600.0, time.time()
    found = [Happening(at, "m", "died") for at in (now - day, now)]
    today, before = re.findall(
        "<time>(.*?)</time>", machine_tables.render_events(found, SAY_ENGLISH)
    )
    assert re.fullmatch(r"\d\d:\d\d:\d\d", today)
    assert before == time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now - day))


def test_reasons_are_told_in_the_language_of_the_page() -> None:
    died = "killed by SIGKILL"
    say, [one] = Say("zh"), model(replica("failed", reason=died)).values()
    html = machine_tables.render_events([Happening(time.time(), "m", "died", died)], say)
    html += machine_tables.render_workers([one], say)
    html += render_models([one], {}, "", "", say)
    assert html.count("被 SIGKILL 终止") == 3
    assert "killed" not in html


# ---------------------------------------------------------------- GPUs


def test_a_gpus_memory_is_told_by_worker() -> None:
    gpu = GpuStatus(0, "GPU-0", "H200", 140 * 2**30, 60 * 2**30, 0.5)
    # what it holds on a GPU that is not its own is in the whole alone
    mine = replica(gpus=("GPU-0",), gpu_bytes=47 * 2**30, held_bytes=(40 * 2**30,))
    wide = {"gpus": ("GPU-1", "GPU-0"), "gpu_bytes": 40 * 2**30}
    spread = replace(mine, name="m/1", **wide, held_bytes=(30 * 2**30, 10 * 2**30))
    html = machine_tables.render_gpus([gpu], list(model(mine, spread).values()), SAY_ENGLISH)
    assert "m/0 <b>40.0 GiB</b>" in html
    assert "m/1 <b>10.0 GiB</b>" in html
    assert "others <b>10.0 GiB</b>" in html
    assert "60.0 GiB / 140.0 GiB" in html
    assert "50 % busy" in html
    silent = machine_tables.render_gpus([replace(gpu, utilisation=None)], [], SAY_ENGLISH)
    assert "busy" not in silent


def test_gpus_of_two_nodes_with_one_index_are_two() -> None:
    there = tuple(replace(GPU, uuid=f"GPU-{node}", node=node) for node in ("10.0.0.4", "10.0.0.5"))
    html = machine_tables.render_gpus(there, [], SAY_ENGLISH)
    assert html.count("<h3>GPU 3 ") == 2
    assert "H200 · 10.0.0.4" in html and "H200 · 10.0.0.5" in html
    status = replace(instance(), gpus=there)
    plots = render_figures([make_sample(at, status, []) for at in (1.0, 2.0)], status, SAY_ENGLISH)
    assert "GPU 3 · 10.0.0.4: now 25 %" in plots and "GPU 3 · 10.0.0.5: now 25 %" in plots
