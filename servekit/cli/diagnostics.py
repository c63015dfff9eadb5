"""The commands for troubleshooting: `servekit trace-cuda` and `servekit doctor`.

`cli.main` registers the commands. They write their output to stdout themselves.
"""

# No string annotations: typer evaluates each several times, which slows down --help.
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from servekit.cli.options import AsJson, RunDirectory


def trace_cuda(
    command: Annotated[list[str] | None, typer.Argument(help="After --: the program.")] = None,
    module: Annotated[
        str | None,
        typer.Option(
            "--import", metavar="MODULE", help="Import this module instead of running a program."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if there are findings.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Run a Python program and find what initialised CUDA in it, with the import that led there."""
    from servekit.diagnostics.cuda_trace import command as tracing

    told, code = tracing.trace_command(command or (), module, as_json=as_json, check=check)
    # The program has its own stdout; with --json that was redirected to stderr.
    (sys.stdout if as_json else sys.stderr).write(f"{told}\n")
    raise typer.Exit(code)


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Also check the requirements of this file; by default as for `servekit up`.",
        ),
    ] = None,
    run_dir: RunDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine is fit to serve: drivers, GPUs, libraries, limits, disk, ports."""
    from servekit.diagnostics.runner import format_findings, run_checks

    findings = run_checks(config or _find_default(), run_dir)
    sys.stdout.write(f"{format_findings(findings, as_json=as_json)}\n")
    raise typer.Exit(any(finding.level == "error" for finding in findings))


def _find_default() -> Path | None:
    """Return the file that `servekit up` would serve, or None if there is none."""
    from servekit.cli.up.sources import ModelOptions, find_source
    from servekit.errors import ConfigError

    try:
        return find_source((), None, ModelOptions(), os.environ)
    except ConfigError:
        return None
