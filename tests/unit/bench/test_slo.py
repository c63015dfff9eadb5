"""Goodput: which limits can be said, and which requests keep them."""

from __future__ import annotations

import pytest

from servekit.bench.client.client_protocol import Record
from servekit.bench.slo import is_good, parse_slo
from servekit.bench.timing import Timing, tokens_in_time, tokens_of
from servekit.errors import ConfigError


def stream(**changes: object) -> Record:
    """First token after 0.2 s, 11 tokens in 6 chunks, the last after 1.2 s, the end after 1.3 s."""
    fields: dict[str, object] = {
        "first": 10.2,
        "last": 11.2,
        "chunks": 6,
        "chunks_in_time": 6,
        "longest_gap_s": 0.4,
        "output_tokens": 11,
    }
    return Record("ok", 10.0, 11.3, **{**fields, **changes})  # type: ignore[arg-type]


def test_the_times_of_a_stream() -> None:
    timing = Timing.from_record(stream())
    assert timing.e2e_s == pytest.approx(1.3)
    assert timing.ttft_s == pytest.approx(0.2)
    assert timing.itl_s == pytest.approx(1.0 / 5)
    assert timing.tpot_s == pytest.approx(1.0 / 10)


def test_chunks_are_tokens_where_nobody_counts() -> None:
    assert tokens_of(stream(output_tokens=None)) == 6
    assert Timing.from_record(stream(output_tokens=None)).tpot_s == pytest.approx(1.0 / 5)


def test_one_chunk_has_no_gaps() -> None:
    timing = Timing.from_record(stream(chunks=1, last=10.2, output_tokens=1))
    assert (timing.itl_s, timing.tpot_s) == (None, None)


def test_tokens_of_one_chunk_have_no_time_each() -> None:
    timing = Timing.from_record(stream(chunks=1, last=10.2))
    assert timing.ttft_s == pytest.approx(0.2)
    assert timing.tpot_s is None


def test_what_is_not_streamed_has_its_end_only() -> None:
    timing = Timing.from_record(Record("ok", 10.0, 11.0, output_tokens=5))
    assert (timing.e2e_s, timing.ttft_s, timing.tpot_s) == (1.0, None, None)


def test_tokens_that_come_after_the_end_are_not_in_the_rate() -> None:
    assert tokens_in_time(stream(), end=12.0) == 11
    assert tokens_in_time(stream(chunks_in_time=3), end=11.0) == pytest.approx(5.5)
    assert tokens_in_time(Record("ok", 10.0, 12.0, output_tokens=9), end=11.0) == 0


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("ttft=0.5,itl=0.05,e2e=10", {"ttft": 0.5, "itl": 0.05, "e2e": 10.0}),
        (" tpot = 50ms , gap=.25s,", {"tpot": 0.05, "gap": 0.25}),
    ],
)
def test_limits_are_read(text: str, limits: dict[str, float]) -> None:
    assert parse_slo(text) == limits


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("p99=1", "write one of ttft"),
        ("ttft", "seconds above 0"),
        ("ttft=fast", "seconds above 0"),
        ("ttft=0", "seconds above 0"),
        ("ttft=-1", "seconds above 0"),
        ("ttft=1,ttft=2", "twice"),
    ],
)
def test_nonsense_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_slo(text)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("ttft=0.21,itl=0.21,gap=0.4,tpot=0.11,e2e=1.31", True),
        ("ttft=0.19", False),
        ("itl=0.19", False),
        ("gap=0.39", False),
        ("tpot=0.09", False),
        ("e2e=1.29", False),
        ("ttft=5,e2e=1.29", False),
    ],
)
def test_every_limit_counts(text: str, good: bool) -> None:
    record = stream()
    assert is_good(record, Timing.from_record(record), parse_slo(text)) is good


def test_a_failure_is_never_good() -> None:
    record = stream(first=None, last=None)
    record.outcome = "http"
    assert not is_good(record, Timing.from_record(record), parse_slo("e2e=100"))


def test_what_has_no_such_time_does_not_break_its_limit() -> None:
    record = Record("ok", 10.0, 11.0, output_tokens=5)
    assert is_good(record, Timing.from_record(record), parse_slo("ttft=0.001,e2e=2"))
