"""Percentiles: exact ones as numpy's, and those of a histogram within its promise."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.bench.percentiles import Histogram, Sample, bucket_of, percentile, value_of

TIMES = st.floats(min_value=0, max_value=1e5, allow_nan=False)


@given(st.lists(TIMES, min_size=1, max_size=60), st.floats(0, 100))
def test_they_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_sample_tells_what_is_in_it_now() -> None:
    sample = Sample([3.0, 1.0])
    assert sample.percentile_value(50) == 2.0
    sample.add(8.0)
    assert (
        sample.percentile_value(0),
        sample.percentile_value(50),
        sample.percentile_value(100),
    ) == (1.0, 3.0, 8.0)
    assert (len(sample), sample.mean, sample.greatest) == (3, 4.0, 8.0)
    assert list(sample.last_values(2).values) == [1.0, 8.0]


@given(st.floats(min_value=1e-6, max_value=1e5))
def test_a_bucket_is_within_its_promise(value: float) -> None:
    assert value_of(bucket_of(value)) == pytest.approx(value, rel=0.003)


def test_no_time_stays_no_time() -> None:
    histogram = Histogram()
    for _ in range(3):
        histogram.add(0.0)
    assert (histogram.percentile_value(50), histogram.mean, histogram.greatest) == (0.0, 0.0, 0.0)


def test_a_histogram_is_near_the_truth() -> None:
    source = random.Random(1)
    values = [source.lognormvariate(-4, 1) for _ in range(20_000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert len(histogram) == len(values)
    assert histogram.mean == pytest.approx(float(np.mean(values)), rel=0.003)
    assert histogram.greatest == pytest.approx(max(values), rel=0.003)
    for percent in (1, 50, 90, 99, 99.9):
        expected = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
        assert histogram.percentile_value(percent) == pytest.approx(expected, rel=0.003)
    assert len(histogram.counts) < 3000


def test_histograms_of_processes_add_up() -> None:
    one, other, both = Histogram(), Histogram(), Histogram()
    for value in range(1, 200):
        (one if value % 3 else other).add(value / 1000)
        both.add(value / 1000)
    one.merge(other.counts)
    assert one.counts == both.counts


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="nothing"):
        Histogram().percentile_value(50)
