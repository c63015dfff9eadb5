"""What is to be done once at the end of this turn of the event loop, however often it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol


class Runs(Protocol):
    def run(self) -> None:
        """Must not raise: others wait behind it."""


class EndOfTick:
    """Runs what was added in this turn, in that order, when the turn is over.

    All of a turn costs the loop one callback: one each is a tenth of a streamed token's time.
    """

    __slots__ = ("_due", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[Runs, None] = {}

    def add(self, one: Runs) -> None:
        """Have `one` run at the end of the turn."""
        due = self._due
        if not due:
            self._loop.call_soon(self._pop)
        due[one] = None

    def add_all(self, several: Iterable[Runs]) -> None:
        """As `add`, of some."""
        due = self._due
        if not due:
            self._loop.call_soon(self._pop)
        due.update(dict.fromkeys(several))

    def _pop(self) -> None:
        due, self._due = self._due, {}
        for one in due:
            one.run()
