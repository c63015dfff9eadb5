"""Sizes and durations as text."""

from __future__ import annotations

import pytest

from servekit.units import (
    count_noun,
    format_bytes,
    format_duration,
    format_latency,
    format_number,
    parse_duration,
)


def test_sizes() -> None:
    sizes = (0, 10, 2048, 5 * 2**20, 2**30 - 1, 3 * 2**30, -5 * 2**30)
    assert [format_bytes(size) for size in sizes] == [
        *("0 B", "10 B", "2 KiB", "5 MiB", "1.0 GiB", "3.0 GiB", "-5.0 GiB")
    ]


def test_counts() -> None:
    assert [count_noun(n, "process") for n in (0, 1, 2)] == [
        *("0 processes", "1 process", "2 processes")
    ]
    assert count_noun(2, "restart") == "2 restarts"


def test_long_times() -> None:
    assert [format_duration(t) for t in (5, 65, 3700, 90_000, -3600)] == [
        *("5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h", "0 s")
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 µs"),
        (0.000051, "51 µs"),
        (0.00123, "1.23 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (12.34, "12.3 s"),
        (123.4, "123 s"),
    ],
)
def test_times_are_short(value: float, text: str) -> None:
    assert format_latency(value) == text


def test_numbers_are_short() -> None:
    found = [format_number(value) for value in (0.0, 1.234, 99.96, 999.6, 12345.6)]
    assert found == ["0", "1.23", "100", "1,000", "12,346"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), (" 2 D ", 172_800)),
        *(("5min", 300), ("1h30m", 5400), ("250ms", 0.25), (".5", 0.5), ("10us", 1e-5), ("0", 0)),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "-1s", "1w", "1h30", "٣m\n", "5m!", "m5"])
def test_texts_that_are_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)
