"""What a process inherits, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OPEN = "from servekit.system.inherited_state import *; open_standard_streams(); reset_signals();"


def run(code: str, closed: tuple[int, ...] = (), **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run code after the call, in a process that was started without these streams."""
    without = " ".join(f"{fd}>&-" for fd in closed)
    command = ["bash", "-c", f'exec "$@" {without}', "bash", sys.executable, "-c", f"{OPEN}{code}"]
    return subprocess.run(command, capture_output=True, env={**os.environ, **env}, check=False)


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_no_file_gets_the_number_of_a_standard_stream(closed: tuple[int, ...]) -> None:
    code = "import os, sys; sys.stdout.write(''); sys.stdin.read(); sys.stderr.write('');"
    assert run(f"{code} sys.exit(os.open('/', os.O_RDONLY))", closed).returncode > 2


def test_what_an_encoding_lacks_is_written_as_a_question_mark() -> None:
    for encoding, written in (("ascii", b"a ?\n"), ("utf-8", "a ·\n".encode())):
        done = run(r"print('a \u00b7')", PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stdout) == (0, written)
