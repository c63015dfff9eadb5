"""Samples at another rate: as many, in time, and the same however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from servekit.engines.media.resampling import Resampler, Samples

RATE = 16_000


def tone(rate: int, hertz: float, seconds: float = 0.5) -> Samples:
    at = np.arange(round(rate * seconds)) / rate
    return np.sin(2 * np.pi * hertz * at).astype(np.float32)


def convert(samples: Samples, old: int, new: int = RATE, block: int = 10_000) -> Samples:
    resampler = Resampler(old, new)
    parts = [
        resampler.take_samples(samples[at : at + block]) for at in range(0, len(samples), block)
    ]
    return np.concatenate([*parts, resampler.end()])


@pytest.mark.parametrize("old", [8000, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000, 192_000])
def test_a_tone_stays_itself(old: int) -> None:
    made = convert(tone(old, 440.0), old)
    assert made.dtype == np.float32
    expected = tone(RATE, 440.0)
    assert abs(len(made) - len(expected)) <= 1
    inner = slice(200, len(expected) - 200)  # without the ends, which have silence beside them
    assert np.abs(made[inner] - expected[inner]).max() < 0.01


def test_what_the_new_rate_cannot_have_is_filtered_out() -> None:
    heard: NDArray[np.float32] = convert(tone(48_000, 10_000.0), 48_000)
    assert np.abs(heard[200:-200]).max() < 0.01
    kept = convert(tone(48_000, 7000.0), 48_000)
    assert np.abs(kept[200:-200]).max() > 0.9


@pytest.mark.parametrize("block", [1, 7, 1000, 10**6])
def test_blocks_of_any_length_are_the_same(block: int) -> None:
    samples = tone(44_100, 440.0, 0.05)
    whole = convert(samples, 44_100, block=len(samples))
    assert np.allclose(convert(samples, 44_100, block=block), whole, atol=1e-6)


def test_the_same_rate_changes_nothing() -> None:
    samples = tone(RATE, 440.0)
    resampler = Resampler(RATE, RATE)
    assert resampler.take_samples(samples) is samples
    assert len(resampler.end()) == 0
    nearly = Resampler(16_012, RATE)
    assert nearly.take_samples(samples) is samples, "odd rates are rounded, so filters stay small"
    assert Resampler(16_013, RATE).take_samples(samples) is not samples


def test_odd_rates_are_rounded_more_coarsely_where_they_are_high() -> None:
    assert Resampler(44_101, RATE)._old == Resampler(44_100, RATE)._old
    assert Resampler(100_049, RATE)._old == Resampler(100_000, RATE)._old
    assert Resampler(99_975, RATE)._old != Resampler(100_000, RATE)._old
    assert Resampler(1, RATE)._old == 1, "25 Hz at least"


def test_no_samples_make_none() -> None:
    resampler = Resampler(44_100, RATE)
    assert len(resampler.take_samples(np.zeros(0, np.float32))) == 0
    assert len(resampler.end()) == 0
    one = Resampler(8000, RATE)
    assert len(one.take_samples(np.ones(1, np.float32))) + len(one.end()) == 2
