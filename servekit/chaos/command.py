"""The entry point of `servekit chaos` behind the command line."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from servekit.chaos.finding import Finding
from servekit.chaos.report import findings_markdown, findings_table
from servekit.chaos.run import RunOptions
from servekit.chaos.run import run_experiments as experiment
from servekit.chaos.target import Target


def run_chaos(url: str, run_dir: Path, model: str | None, wish: RunOptions) -> list[Finding]:
    """Run the experiments, with progress on stderr. Raises ServekitError."""
    wish.experiments()  # reject a wrong name early
    return asyncio.run(_run_experiments(url, run_dir, model, wish))


async def _run_experiments(
    url: str, run_dir: Path, model: str | None, wish: RunOptions
) -> list[Finding]:
    target = await Target.find(url, run_dir, model)
    findings = []
    console = Console(stderr=True, highlight=False, markup=False)
    async for finding in experiment(target, wish):
        console.print(f"{finding.experiment}: {finding.verdict}")
        findings.append(finding)
    return findings


def format_findings(findings: Sequence[Finding], *, as_json: bool) -> str:
    """Format findings as JSON, as a table on a terminal, or as Markdown for a file."""
    if as_json:
        return msgspec.json.format(msgspec.json.encode(findings)).decode()
    if not sys.stdout.isatty():
        return findings_markdown(findings)
    console = Console(file=io.StringIO(), force_terminal=True, width=Console().width, emoji=False)
    with console.capture() as captured:
        console.print(findings_table(findings))
    return captured.get()
