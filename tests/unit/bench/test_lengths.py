"""Distributions of lengths: what is written is what is drawn."""

from __future__ import annotations

import random
import statistics

import pytest

from servekit.bench.lengths import Lengths, parse_lengths
from servekit.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("256", Lengths("fixed", 256)),
        (" 1 ", Lengths("fixed", 1)),
        ("128..512", Lengths("uniform", 128, 512)),
        ("uniform:128,512", Lengths("uniform", 128, 512)),
        ("normal:256,64", Lengths("normal", 256, 64)),
        ("lognormal:256, 64.5", Lengths("lognormal", 256, 64.5)),
        ("normal:256,0", Lengths("normal", 256, 0)),
    ],
)
def test_they_are_read_and_written(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, "--x") == lengths
    assert parse_lengths(str(lengths), "--x") == lengths


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write 256"),
        ("abc", "write 256"),
        ("-5", "write 256"),
        ("12.5", "write 256"),
        ("normal:256", "write 256"),
        ("zipf:1,2", "write 256"),
        ("uniform:1.5,2", "write 256"),
        ("0", "below 1"),
        ("0..5", "below 1"),
        ("512..128", "smaller one first"),
        ("99999999999", "more than"),
        ("normal:nan,1", "write 256"),
    ],
)
def test_nonsense_is_refused_by_its_option(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        parse_lengths(text, "--prompt-tokens")
    assert error.value.message.startswith(f"--prompt-tokens {text!r}")


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_mean_and_deviation_are_those_of_the_length(kind: str) -> None:
    lengths = parse_lengths(f"{kind}:400,100", "--x")
    source = random.Random(1)
    drawn = [lengths.draw(source) for _ in range(20_000)]
    assert statistics.mean(drawn) == pytest.approx(400, rel=0.01)
    assert statistics.stdev(drawn) == pytest.approx(100, rel=0.03)


def test_uniform_has_both_ends_and_nothing_else() -> None:
    lengths, source = parse_lengths("3..5", "--x"), random.Random(1)
    assert {lengths.draw(source) for _ in range(200)} == {3, 4, 5}


def test_nothing_is_shorter_than_one_or_absurdly_long() -> None:
    source = random.Random(1)
    assert min(parse_lengths("normal:1,50", "--x").draw(source) for _ in range(500)) == 1
    assert (
        max(parse_lengths("lognormal:1,9999999", "--x").draw(source) for _ in range(500))
        <= 10_000_000
    )
