"""The entry point of `servekit trace-cuda` behind the command line."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from servekit.diagnostics.cuda_trace import program
from servekit.diagnostics.cuda_trace.report import make_report, report_text


def trace_command(
    words: Sequence[str], module: str | None, *, as_json: bool, check: bool
) -> tuple[str, int]:
    """Run the program; return the report and the exit code. Raises ServekitError.

    With `as_json` the program's stdout goes to stderr, so that stdout has only the report.
    """
    command = program.command_of(words, module)
    with tempfile.TemporaryDirectory(prefix="servekit-trace-") as folder:
        out = sys.stderr.fileno() if as_json else None
        trace = program.run_traced(command, Path(folder), stdout=out)
    trace.only_imports = module is not None
    found = make_report(trace)
    code: int = 1 if check and found["findings"] else found["exit_code"]
    return json.dumps(found, indent=2) if as_json else report_text(found), code
