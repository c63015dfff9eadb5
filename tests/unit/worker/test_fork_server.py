"""The process that prepares an engine and forks workers: its preparation yields cores."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from servekit.worker import fork_server

os.nice(int(sys.argv[1]))
fork_server._yield_cores()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.parametrize(("before", "after"), [(0, 10), (15, 15)])
def test_the_preparation_is_as_nice_as_its_parent_or_more(before: int, after: int) -> None:
    """Only root may be less nice than before."""
    here = int(subprocess.run(["nice"], capture_output=True, check=True).stdout)
    command = [sys.executable, "-c", SCRIPT, str(max(0, before - here))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == max(here, after)
