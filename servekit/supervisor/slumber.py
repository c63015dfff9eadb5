"""What one worker was told about sleep, and has not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from servekit.wire.residency import Asleep, Awake, NotDone, Sleep, Wake

Order = Sleep | Wake
Answer = Asleep | Awake | NotDone


class Slumber:
    """The open order of one incarnation. It is answered: by it, or by its death."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[Answer] | None = None

    async def send(
        self,
        order: Order,
        send: Callable[[Order], None],
        late: Callable[[], None],
        deadline_s: float,
    ) -> Answer:
        """Send an order and return its answer. `late` is called after `deadline_s`, to end it."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._answer = answer
        timer = loop.call_later(deadline_s, late)
        try:
            send(order)
            return await answer
        finally:
            timer.cancel()
            self._answer = None

    def answered(self, message: Answer) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def died(self) -> None:
        """No answer comes any more."""
        self.answered(NotDone("its worker died"))
