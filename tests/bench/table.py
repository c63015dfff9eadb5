"""A figure, and the table that figures are printed as."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One row. `met` None: nothing is to be reached, or it was measured under other conditions."""

    what: str
    measured: str
    to_reach: str = ""
    met: bool | None = None
    how: str = ""


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """The median, and the least and greatest beside it."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f}{unit} ({low:,.{digits}f}–{high:,.{digits}f})"


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def markdown(figures: Iterable[Figure]) -> str:
    """The figures as a Markdown table."""
    head = ("what", "measured", "to reach", "met", "how")
    rows = [(f.what, f.measured, f.to_reach, _met(f.met), f.how) for f in figures]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _met(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "**no**"
