"""From records to a result's figures."""

from __future__ import annotations

import pytest

from servekit.bench.aggregator import Machine, Tally
from servekit.bench.client.client_protocol import Ended, Record, Report
from servekit.bench.output.result import Run


def ok(began: float, ended: float, tokens: int | None = 10, chunks: int = 5) -> Record:
    first = began + 0.1
    return Record("ok", began, ended, first, ended, chunks, chunks, 0.1, 7, tokens)


def tallied(*records: Record, end: float | None = None, slo: dict[str, float] | None = None) -> Run:
    tally = Tally(100.0, slo or {}, end)
    for client, record in enumerate(records):
        tally.report(client, Report([record], {}, 1, 0, record.chunks))
    tally.add_end(Ended(end or 110.0, 0.5, {}, {}, 0))
    calm = Machine(0.2, 2, has_server=True)
    return tally.make_result(concurrency=4, rate=None, interrupted=False, machine=calm)


def test_rates_are_over_the_time_that_was_asked_in() -> None:
    run = tallied(ok(100, 101), ok(101, 105), ok(104, 112), end=110.0)
    assert run.duration_s == 10.0
    assert (run.completed, run.failed) == (3, 0)
    assert run.requests_per_s == pytest.approx(0.2), "the third was answered too late"
    assert run.e2e_s is not None and run.e2e_s.count == 3, "but its latency counts"
    assert run.e2e_s.max == pytest.approx(8.0)


def test_a_stream_across_the_end_counts_by_its_share() -> None:
    late = ok(104, 112)
    late.chunks_in_time = 2
    assert tallied(late, end=110.0).output_tokens_per_s == pytest.approx(10 * 2 / 5 / 10)


@pytest.mark.parametrize(
    ("records", "by"),
    [
        ([ok(100, 101)], "usage"),
        ([ok(100, 101, tokens=None)], "chunks"),
        ([ok(100, 101), ok(100, 101, tokens=None)], "both"),
        ([Record("ok", 100, 101)], "none"),
    ],
)
def test_who_counted_the_tokens_is_said(records: list[Record], by: str) -> None:
    assert tallied(*records).tokens_by == by


def test_errors_are_told_by_kind_with_the_first_message() -> None:
    refused = [Record("http", 100, 101, status=429, message=f"queue {n}") for n in range(2)]
    cut = Record("cut", 100, 103, 100.5, 102, 3, 3, message="the connection was lost")
    run = tallied(*refused, cut, Record("http", 100, 101, status=500), ok(100, 102))
    assert [(e.kind, e.count) for e in run.errors] == [("http 429", 2), ("cut", 1), ("http 500", 1)]
    assert run.errors[0].message == "queue 0"
    assert (run.completed, run.failed) == (1, 4)
    assert run.e2e_s is not None and run.e2e_s.count == 1, "failures have no latency"
    assert run.output_tokens_per_s == pytest.approx((10 + 3) / 10), "but what they brought came"


def test_goodput_is_of_all_that_ended() -> None:
    slow, failed = ok(100, 109), Record("timeout", 100, 105)
    run = tallied(ok(100, 101), slow, failed, ok(105, 111), end=110.0, slo={"e2e": 7.0})
    assert run.goodput is not None
    assert run.goodput.requests_per_s == pytest.approx(0.1)
    assert run.goodput.share == pytest.approx(2 / 4)


def test_no_slo_no_goodput() -> None:
    assert tallied(ok(100, 101)).goodput is None


def test_unfinished_is_neither_done_nor_failed() -> None:
    run = tallied(Record("unfinished", 100, 105, 101, 104, 4, 4), ok(100, 101))
    assert (run.completed, run.failed, run.unfinished) == (1, 0, 1)
    assert run.output_tokens_per_s == pytest.approx((10 + 4) / 10)


def test_the_timeline_has_every_second() -> None:
    run = tallied(ok(100, 100.5), ok(100, 103.9), Record("timeout", 100, 103.1))
    found = [(second.requests, second.failed, second.output_tokens) for second in run.timeline]
    assert found == [(1, 0, 10), (0, 0, 0), (0, 0, 0), (1, 1, 10)]


def test_nothing_at_all_is_a_result_too() -> None:
    run = tallied()
    assert (run.completed, run.ttft_s, run.tokens_by, run.timeline) == (0, None, "none", [])


def test_gaps_of_all_clients_are_one() -> None:
    tally = Tally(100.0, {})
    tally.report(0, Report([], {1000: 3}, 4, 2, 9))
    tally.report(1, Report([], {1000: 1, 0: 2}, 5, 1, 3))
    tally.report(0, Report([], {}, 6, 1, 12))
    assert tally.gaps.counts == {1000: 4, 0: 2}
    assert (tally.sent, tally.in_flight, tally.chunks) == (11, 2, 15)
