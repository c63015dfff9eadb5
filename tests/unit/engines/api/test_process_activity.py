from __future__ import annotations

import os
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
    before, _ = process_activity.measure_activity()
    deadline = time.monotonic() + 30
    while process_activity.measure_activity()[0] <= before and time.monotonic() < deadline:
        sum(range(100_000))
    assert process_activity.measure_activity()[0] > before


def test_this_process_can_be_left_out() -> None:
    whole = process_activity.measure_activity()[0]
    others = process_activity.measure_activity(os.getpid())[0]
    assert others < whole
