"""The time limits of an instance's shutdown, and its final report."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import structlog

from servekit.supervisor.event_log import journal

log: Any = structlog.get_logger("servekit.supervisor")

#: From the end of the grace time to giving up on a process that SIGKILL does not end: it is stuck
#: in the kernel, as with a broken GPU driver.
KILL_S = 15.0
#: From Stop to SIGTERM for a worker that has nothing in flight.
WORKER_GRACE_S = 5.0
#: The longest shutdown beyond `drain_timeout_s`; systemd waits as long.
END_S = WORKER_GRACE_S + 2 * KILL_S


def last_words(stuck: Collection[str]) -> int:
    """Log how the instance has ended, with the names of stuck processes. Returns the exit code."""
    names = sorted(stuck)
    journal.tell("down", f"stuck in the kernel: {names}" if stuck else "stopped")
    if stuck:
        log.error("processes_stuck", children=names)
        return 1
    log.info("supervisor_stopped")
    return 0
