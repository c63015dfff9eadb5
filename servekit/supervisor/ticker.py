"""The supervisor's pulse: what it does again and again, and how it finds out that it has slept."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import structlog

from servekit.system import subreaper

log: Any = structlog.get_logger("servekit.supervisor")

#: How often stalls are looked for, and after which gap we must have slept ourselves.
TICK_S = 0.2
SLEPT_S = 2.0


async def ticking(look: Callable[[bool], None], measure: Callable[[int], None]) -> None:
    """Until cancelled: look (told whether we have slept), measure (told how often before)."""
    last = time.monotonic()
    for count in itertools.count():
        now = time.monotonic()
        try:
            look(now - last > SLEPT_S)
            measure(count)
        except Exception:  # a figure that cannot be read is no reason to stop asking
            log.exception("cannot measure")
        subreaper.look()
        last = now
        await asyncio.sleep(TICK_S)
