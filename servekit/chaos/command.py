"""`servekit chaos`: what stands between the command line and the experiments."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from servekit.chaos.finding import Finding
from servekit.chaos.report import markdown, table
from servekit.chaos.run import RunOptions
from servekit.chaos.run import run as experiment
from servekit.chaos.target import Target


def run(url: str, run_dir: Path, model: str | None, wish: RunOptions) -> list[Finding]:
    """Run the experiments; says on stderr which one is on. Raises ServekitError."""
    wish.experiments()  # a wrong name is told before anything is asked
    return asyncio.run(_run(url, run_dir, model, wish))


async def _run(url: str, run_dir: Path, model: str | None, wish: RunOptions) -> list[Finding]:
    target = await Target.find(url, run_dir, model)
    findings = []
    console = Console(stderr=True, highlight=False, markup=False)
    async for finding in experiment(target, wish):
        console.print(f"{finding.experiment}: {finding.verdict}")
        findings.append(finding)
    return findings


def told(findings: Sequence[Finding], *, as_json: bool) -> str:
    """JSON, or a table on a terminal, or Markdown for a file."""
    if as_json:
        return msgspec.json.format(msgspec.json.encode(findings)).decode()
    if not sys.stdout.isatty():
        return markdown(findings)
    console = Console(file=io.StringIO(), force_terminal=True, width=Console().width, emoji=False)
    with console.capture() as captured:
        console.print(table(findings))
    return captured.get()
