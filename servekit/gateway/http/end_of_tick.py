"""Deduplicated callbacks that run at the end of the current event-loop tick."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol


class Runs(Protocol):
    def run(self) -> None:
        """Run the callback; it must not raise, because the callbacks behind it would not run."""


class EndOfTick:
    """The set of callbacks added in this tick, run in that order when the tick is over.

    All of them share one `call_soon`, whose cost for each token of each stream would be notable.
    """

    __slots__ = ("_due", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[Runs, None] = {}

    def add(self, one: Runs) -> None:
        """Run `one` at the end of the tick, once however often it is added."""
        due = self._due
        if not due:
            self._loop.call_soon(self._pop)
        due[one] = None

    def add_all(self, several: Iterable[Runs]) -> None:
        """Add several callbacks, as `add` does."""
        due = self._due
        if not due:
            self._loop.call_soon(self._pop)
        due.update(dict.fromkeys(several))

    def _pop(self) -> None:
        due, self._due = self._due, {}
        for one in due:
            one.run()
