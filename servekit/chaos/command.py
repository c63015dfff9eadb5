"""The entry point of `servekit chaos` behind the command line."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from servekit.chaos.result import ExperimentResult
from servekit.chaos.run import RunOptions, run_experiments
from servekit.chaos.target import Target
from servekit.errors import ServekitError
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


def table_cells(finding: ExperimentResult) -> list[str]:
    counts = (finding.sent, finding.answered, finding.failed, finding.wrong)
    numbers = [str(count) if finding.sent else "-" for count in counts]
    times = [format_latency(finding.notice_s), format_latency(finding.whole_s)]
    deed = finding.deed or finding.experiment
    return [deed, *numbers, *times, finding.verdict, finding.detail]


def findings_table(findings: Sequence[ExperimentResult]) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        drawn.add_column(column)
    for finding in findings:
        *first, verdict, detail = table_cells(finding)
        drawn.add_row(*first, Text(verdict, _COLOURS[finding.verdict]), Text(detail))
    return drawn


def findings_markdown(findings: Sequence[ExperimentResult]) -> str:
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    lines += [
        "| " + " | ".join(map(_escape_cell, table_cells(finding))) + " |" for finding in findings
    ]
    return "\n".join(lines)


def _escape_cell(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def run_chaos(
    url: str, run_dir: Path, model: str | None, options: RunOptions
) -> list[ExperimentResult]:
    """Run the experiments, with progress on stderr. Raises ServekitError."""
    options.experiments()  # reject a wrong name early
    return asyncio.run(_run_experiments(url, run_dir, model, options))


async def _run_experiments(
    url: str, run_dir: Path, model: str | None, options: RunOptions
) -> list[ExperimentResult]:
    target = await Target.find_target(url, run_dir, model)
    findings = []
    console = Console(stderr=True, highlight=False, markup=False)
    try:
        async for finding in run_experiments(target, options):
            console.print(f"{finding.experiment}: {finding.verdict}")
            findings.append(finding)
    except ServekitError as error:
        if not findings:
            raise
        # what the experiments before have found says why
        findings.append(ExperimentResult("the rest", "", "broken", detail=error.message))
    return findings


def format_findings(findings: Sequence[ExperimentResult], *, as_json: bool) -> str:
    """Format findings as JSON, as a table on a terminal, or as Markdown for a file."""
    if as_json:
        return msgspec.json.format(msgspec.json.encode(findings)).decode()
    if not sys.stdout.isatty():
        return findings_markdown(findings)
    console = Console(file=io.StringIO(), force_terminal=True, width=Console().width, emoji=False)
    with console.capture() as captured:
        console.print(findings_table(findings))
    return captured.get()
