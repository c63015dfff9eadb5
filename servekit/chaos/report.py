"""Findings as a table: for a terminal, and as Markdown for a file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from servekit.chaos.finding import Finding
from servekit.units import format_latency

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


def table_cells(finding: Finding) -> list[str]:
    counts = (finding.sent, finding.answered, finding.failed, finding.wrong)
    numbers = [str(count) if finding.sent else "-" for count in counts]
    times = [format_latency(finding.notice_s), format_latency(finding.whole_s)]
    deed = finding.deed or finding.experiment
    return [deed, *numbers, *times, finding.verdict, finding.detail]


def findings_table(findings: Sequence[Finding]) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        drawn.add_column(column)
    for finding in findings:
        *first, verdict, detail = table_cells(finding)
        drawn.add_row(*first, Text(verdict, _COLOURS[finding.verdict]), Text(detail))
    return drawn


def findings_markdown(findings: Sequence[Finding]) -> str:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines += [
        "| " + " | ".join(map(_escape_cell, table_cells(finding))) + " |" for finding in findings
    ]
    return "\n".join(lines)


def _escape_cell(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
