"""The result of one check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from servekit.units import count_noun

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the answer. `said` states the facts and, unless it is ok, the remedy."""

    area: str
    level: Level
    said: str


def findings_text(findings: Sequence[Finding]) -> str:
    """Format findings for people: one line each, and the totals."""
    width = max((len(finding.area) for finding in findings), default=0)
    lines = [f"{f.level:<8} {f.area:<{width}}  {f.said}" for f in findings]
    counts = Counter(finding.level for finding in findings)
    totals = ", ".join(count_noun(counts[level], level) for level in ("error", "warning"))
    return "\n".join([*lines, totals])
