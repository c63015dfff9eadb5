"""What is to be done once at the end of this turn of the event loop, however often it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Cork:
    """Runs what was added in this turn, in that order, when the turn is over.

    All of a turn costs the loop one callback: one each is a tenth of a streamed token's time.
    """

    __slots__ = ("_due", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[Callable[[], None]] = []

    def add(self, run: Callable[[], None]) -> None:
        """Have `run` called at the end of the turn. It must not raise: others wait behind it."""
        if not self._due:
            self._loop.call_soon(self._pop)
        self._due.append(run)

    def _pop(self) -> None:
        due, self._due = self._due, []
        for run in due:
            run()
