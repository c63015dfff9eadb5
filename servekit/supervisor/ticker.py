"""The supervisor's tick: its periodic checks, and the detection of its own suspension."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import structlog

from servekit.system import subreaper

log: Any = structlog.get_logger("servekit.supervisor")

#: The interval of ticks, and the gap between two ticks that means we were suspended.
TICK_S = 0.2
SLEPT_S = 2.0


async def ticking(look: Callable[[bool], None], measure: Callable[[int], None]) -> None:
    """Call `look(suspended)` and `measure(tick count)` at each tick, until cancelled."""
    last = time.monotonic()
    for count in itertools.count():
        now = time.monotonic()
        try:
            look(now - last > SLEPT_S)
            measure(count)
        except Exception:  # a figure that cannot be read must not stop the ticks
            log.exception("measurement_failed")
        subreaper.look()
        last = now
        await asyncio.sleep(TICK_S)
