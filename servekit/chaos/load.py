"""Load: a fixed number of clients that ask one question after the other, and note the answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from servekit.chaos.baseline_answers import Known, Tally
from servekit.chaos.client import PATIENCE_S, Answer, Client, Exchange, patiently


class Load:
    """`async with`: keeps the clients busy until left, and returns when all have their answers.

    `streams` of the clients read streams, `wholes` wait for whole answers. `excused` says of an
    answer that its failure is nobody's fault: it is not counted.
    """

    def __init__(
        self, client: Client, known: Sequence[Known], streams: int, wholes: int = 0
    ) -> None:
        self.tally = Tally()
        self.active: set[Exchange] = set()  # streams under way
        self.excused: Callable[[Answer], bool] = lambda answer: False
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
        self.stop()
        if error is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=error is not None)

    def stop(self) -> None:
        """Ask nothing new; what is under way may be answered."""
        self._stopping = True

    async def _run(self, stream: bool) -> None:
        while not self._stopping:
            known = next(self._known)
            exchange = await self._client.begin(known.question, stream=stream)
            if stream:
                self.active.add(exchange)
            try:
                answer = await patiently(exchange, PATIENCE_S)
            finally:
                self.active.discard(exchange)
                exchange.abort()
            self._note(known, answer)
            if answer.failure:
                await asyncio.sleep(0.05)  # a server that refuses at once is not to be hammered

    def _note(self, known: Known, answer: Answer) -> None:
        if answer.failure and self.excused(answer):
            self.excuses += 1
        else:
            self.tally.add(known, answer)

    async def until_busy(self, within_s: float = 10.0) -> None:
        """Return when every stream has text on the way, or when the time is up."""
        deadline = time.monotonic() + within_s
        wanted = sum(self._kinds)
        while time.monotonic() < deadline:
            if sum(exchange.answer.chunks > 0 for exchange in self.active) >= wanted:
                return
            await asyncio.sleep(0.01)


class Silences:
    """How long the streams that are under way at a moment wait for their next chunk."""

    def __init__(self, active: set[Exchange]) -> None:
        self.silent_s: list[float] = []
        self._since = {exchange: exchange.last_s for exchange in active if exchange.answer.chunks}
        for exchange in self._since:
            exchange.next_text.append(self._on_text)

    def _on_text(self, exchange: Exchange, now: float) -> None:
        self.silent_s.append(now - self._since.pop(exchange))

    def longest(self, count: int) -> list[float]:
        """Those of the `count` streams that waited longest: the ones on the victim, most likely."""
        return sorted(self.silent_s)[len(self.silent_s) - count :] if count else []
