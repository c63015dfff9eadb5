"""The one way in which tests wait for what nobody tells them of: look again, up to a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

#: On a machine that is busy with others; what takes longer has failed.
WITHIN_S = 60.0


def poll(what: str, probe: Callable[[], T], within_s: float = WITHIN_S) -> T:
    """Return the first true answer of `probe`; AssertionError with `what` after the deadline."""
    for pause_s in _pauses(what, within_s):
        if found := probe():
            return found
        time.sleep(pause_s)  # between two looks, until the deadline
    raise AssertionError  # the pauses end with one of their own


async def poll_async(what: str, probe: Callable[[], T], within_s: float = WITHIN_S) -> T:
    """As `poll`, while the loop goes on."""
    for pause_s in _pauses(what, within_s):
        if found := probe():
            return found
        await asyncio.sleep(pause_s)  # between two looks, until the deadline
    raise AssertionError


def _pauses(what: str, within_s: float) -> Iterator[float]:
    """Yield how long to wait after each look: a look costs whoever is asked some milliseconds."""
    began = time.monotonic()
    yield 0.002
    while (passed_s := time.monotonic() - began) < within_s:
        yield min(0.2, 0.004 + passed_s / 10)
    raise AssertionError(f"not within {within_s:g} s: {what}")
