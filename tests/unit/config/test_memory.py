"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from servekit.config.memory import memory_bytes, parse_memory


@pytest.mark.parametrize(
    ("text", "amount", "is_share"),
    [
        ("20GiB", 20 * 2**30, False),
        ("20 gib", 20 * 2**30, False),
        (" 800MB ", 800 * 10**6, False),
        ("1.5kib", 1536, False),
        ("7b", 7, False),
        ("2TB", 2 * 10**12, False),
        ("2TiB", 2 * 2**40, False),
        ("40%", 40, True),
        ("0.5 %", 0.5, True),
        ("100%", 100, True),
    ],
)
def test_amounts(text: str, amount: float, is_share: bool) -> None:
    assert parse_memory(text) == (amount, is_share)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not an amount of memory"),
        ("20", "is not an amount of memory"),
        ("20 apples", "is not an amount of memory"),
        ("GiB", "is not an amount of memory"),
        ("-1GiB", "is not an amount of memory"),
        ("1e3MB", "is not an amount of memory"),
        ("9" * 400 + "GiB", "is not an amount of memory"),
        ("0GiB", "more than 0 bytes"),
        ("0%", "over 0% and at most 100%"),
        ("100.1%", "over 0% and at most 100%"),
    ],
)
def test_what_is_no_amount_is_told_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_memory(text)


def test_a_share_is_one_of_the_total() -> None:
    assert memory_bytes("25%", 1000) == 250
    assert memory_bytes("1kb", 10) == 1000
