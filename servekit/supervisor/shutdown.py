"""How long the end of an instance may take, and its last words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import structlog

from servekit.supervisor.event_log import journal

log: Any = structlog.get_logger("servekit.supervisor")

#: From the end of a grace to giving up on a process that SIGKILL does not end: one that is stuck
#: in the kernel, as a broken GPU driver has it.
KILL_S = 15.0
#: From Stop to SIGTERM for a worker that has nothing in flight.
WORKER_GRACE_S = 5.0
#: The longest that ending takes beyond `drain_timeout_s`; who stops it from outside waits as long.
END_S = WORKER_GRACE_S + 2 * KILL_S


def last_words(stuck: Collection[str]) -> int:
    """Say how it has ended, with the names of those that nothing ends. The exit code."""
    names = sorted(stuck)
    journal.tell("down", f"stuck in the kernel: {names}" if stuck else "stopped")
    if stuck:
        log.error("killed, but stuck in the kernel", children=names)
        return 1
    log.info("stopped")
    return 0
