"""Plots: scales, gaps, and what they say in words."""

from __future__ import annotations

import re

import pytest

from servekit.gateway.ui.pages.language import SAY_ENGLISH
from servekit.gateway.ui.widgets.plots import (
    HEIGHT,
    WIDTH,
    PlotLine,
    format_number,
    render_chart,
    round_up,
)


@pytest.mark.parametrize(
    ("most", "top"), [(0, 1), (0.3, 0.5), (1, 1), (3, 5), (99, 100), (101, 200), (4e6, 5e6)]
)
def test_the_scale_ends_at_a_round_number(most: float, top: float) -> None:
    assert round_up(most) == pytest.approx(top)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.123, "0.12"), (12.34, "12.3"), (1234, "1234"), (54321, "54.32k")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_curve_lies_within_and_breaks_where_nothing_is_known() -> None:
    points = [(300.0, 0.0), (200.0, 5.0), (100.0, None), (50.0, 10.0), (0.0, 7.0)]
    made = render_chart("T", "ms", [PlotLine("", points)], 300.0, SAY_ENGLISH)
    path = re.findall(r' d="([^"]*)"', made)[0]
    assert path.count("M") == 2
    for x, y in re.findall(r"([\d.]+) ([\d.]+)", path):
        assert 0 <= float(x) <= WIDTH
        assert 0 <= float(y) <= HEIGHT
    assert 'aria-label="T. now 7 ms, at most 10 ms"' in made


def test_what_is_older_than_the_span_is_left_out_and_nothing_is_said_of_nothing() -> None:
    old = render_chart("T", "", [PlotLine("", [(400.0, 1.0)])], 300.0, SAY_ENGLISH)
    assert ' d=""' in old
    assert "nothing yet" in render_chart("T", "", [PlotLine("", [])], 300.0, SAY_ENGLISH)
    lone = render_chart(
        "T", "", [PlotLine("a<b", [(1.0, 1.0)]), PlotLine("c", [], 1)], 300.0, SAY_ENGLISH
    )
    assert "h0.01" in lone  # a dot
    assert "a<b" not in lone
