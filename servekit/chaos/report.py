"""Findings as a table: for a terminal, and as Markdown for a file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from servekit.chaos.finding import Finding

_COLOURS = {"kept": "green", "broken": "bold red", "skipped": "dim"}
_COLUMNS = (
    "what was done",
    "sent",
    "answered",
    "failed",
    "wrong text",
    "noticed",
    "whole again",
    "promise",
    "",
)


def seconds(time_s: float | None) -> str:
    """Format a time: "8 ms", "1.25 s"; "-" for None."""
    if time_s is None:
        return "-"
    return f"{time_s * 1000:.0f} ms" if time_s < 1 else f"{time_s:.2f} s"


def cells(finding: Finding) -> list[str]:
    counts = (finding.sent, finding.answered, finding.failed, finding.wrong)
    numbers = [str(count) if finding.sent else "-" for count in counts]
    times = [seconds(finding.notice_s), seconds(finding.whole_s)]
    deed = finding.deed or finding.experiment
    return [deed, *numbers, *times, finding.verdict, finding.detail]


def table(findings: Sequence[Finding]) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        drawn.add_column(column)
    for finding in findings:
        *first, verdict, detail = cells(finding)
        drawn.add_row(*first, Text(verdict, _COLOURS[finding.verdict]), Text(detail))
    return drawn


def markdown(findings: Sequence[Finding]) -> str:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines += ["| " + " | ".join(map(_escaped, cells(finding))) + " |" for finding in findings]
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
