"""The import of structlog, in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

LEAN = "from servekit.system.python.lean_start import import_structlog; import_structlog()\n"


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_rich_is_left_out_and_can_be_imported_later() -> None:
    code = "import sys, structlog.dev; print('rich' in sys.modules)\nimport rich.console; print(1)"
    assert run(f"{LEAN}{code}") == "False\n1\n"


def test_rich_that_is_there_stays() -> None:
    code = f"import rich, sys\nbefore = rich\n{LEAN}import rich; print(rich is before)"
    assert run(code) == "True\n"


def test_a_traceback_is_written_all_the_same() -> None:
    code = "from servekit import logging_config; logging_config.configure('w', json=True)\n"
    code += "import structlog, sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n"
    code += "    structlog.get_logger('servekit.worker').exception('unexpected_error')\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{LEAN}{code}"], capture_output=True, text=True, timeout=60
    )
    assert "ZeroDivisionError: division by zero" in done.stderr
