from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

from servekit.engines.api import process_activity
from servekit.protocol.messages import Progress


def test_work_is_progress() -> None:
    reports: list[Progress] = []
    enough = threading.Event()

    def report(progress: Progress) -> None:
        reports.append(progress)
        if len(reports) > 1:
            enough.set()

    with process_activity.report_activity(report):
        deadline = time.monotonic() + 30
        while not enough.is_set() and time.monotonic() < deadline:
            sum(range(10_000))
    assert enough.is_set() and {one.phase for one in reports} == {"load"}


def test_what_is_used_grows() -> None:
    _run_in_its_own_group(
        """
        before, _ = measure_activity()
        deadline = time.monotonic() + 30
        while measure_activity()[0] <= before and time.monotonic() < deadline:
            sum(range(100_000))
        assert measure_activity()[0] > before
        """
    )


def test_this_process_can_be_left_out() -> None:
    _run_in_its_own_group(
        """
        deadline = time.monotonic() + 30
        while measure_activity()[0] == 0 and time.monotonic() < deadline:
            sum(range(100_000))
        assert measure_activity()[0] > 0 == measure_activity(os.getpid())[0]
        """
    )


def _run_in_its_own_group(code: str) -> None:
    """Run the code in a process group of its own: those of the other tests come and go."""
    imports = (
        "import os, time\nfrom servekit.engines.api.process_activity import measure_activity\n"
    )
    subprocess.run(
        [sys.executable, "-c", imports + textwrap.dedent(code)],
        start_new_session=True,
        check=True,
        timeout=60,
    )
