"""Load generation: a fixed number of clients that repeat questions and record the answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from servekit.chaos.baseline_answers import BaselineAnswer, Tally
from servekit.chaos.client import PATIENCE_S, ChatAnswer, ChatExchange, Client, await_answer


class Load:
    """An async context that keeps clients busy; leaving it waits for all answers.

    `streams` of the clients read streams, `wholes` wait for whole answers. `excused` returns
    whether an answer's failure is expected: it is then not counted.
    """

    def __init__(
        self, client: Client, known: Sequence[BaselineAnswer], streams: int, wholes: int = 0
    ) -> None:
        self.tally = Tally()
        self.active: set[ChatExchange] = set()  # running streams
        self.excused: Callable[[ChatAnswer], bool] = lambda answer: False
        self.excuses = 0
        self._client = client
        self._known = itertools.cycle(known)
        self._kinds = [True] * streams + [False] * wholes
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._run(stream)) for stream in self._kinds]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.end_load()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)

    def end_load(self) -> None:
        """Send no more requests; running ones may be answered."""
        self._stopping = True

    async def _run(self, stream: bool) -> None:
        while not self._stopping:
            known = next(self._known)
            exchange = await self._client.send_request(known.question, stream=stream)
            if stream:
                self.active.add(exchange)
            try:
                answer = await await_answer(exchange, PATIENCE_S)
            finally:
                self.active.discard(exchange)
                exchange.abort()
            self._note(known, answer)
            if answer.failure:
                await asyncio.sleep(0.05)  # do not hammer a server that refuses at once

    def _note(self, known: BaselineAnswer, answer: ChatAnswer) -> None:
        if answer.failure and self.excused(answer):
            self.excuses += 1
        else:
            self.tally.add(known, answer)

    async def until_busy(self, within_s: float = 10.0) -> None:
        """Wait until every stream has text, or for a timeout."""
        deadline = time.monotonic() + within_s
        wanted = sum(self._kinds)
        while time.monotonic() < deadline:
            if sum(exchange.answer.chunks > 0 for exchange in self.active) >= wanted:
                return
            await asyncio.sleep(0.01)


class Silences:
    """The times that running streams wait for their next chunk, from one moment on."""

    def __init__(self, active: set[ChatExchange]) -> None:
        self.silent_s: list[float] = []
        self._since = {exchange: exchange.last_s for exchange in active if exchange.answer.chunks}
        for exchange in self._since:
            exchange.next_text.append(self._on_text)

    def _on_text(self, exchange: ChatExchange, now: float) -> None:
        self.silent_s.append(now - self._since.pop(exchange))

    def longest(self, count: int) -> list[float]:
        """Return the `count` longest silences: most likely those of the victim's streams."""
        return sorted(self.silent_s)[len(self.silent_s) - count :] if count else []
