"""One request's life at the gateway: it waits, runs, perhaps on several workers in turn, ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from servekit.errors import RequestError
from servekit.wire.messages import ChatMessage, Delta, Generate, SamplingParams

if TYPE_CHECKING:
    from servekit.gateway.pool import Replica

Deltas = list[Delta]


class Call:
    """A request on its way. Its consumer awaits `deltas()` until one has `finish` set.

    The Call keeps the token ids reported so far: a worker that dies leaves enough behind to go on
    elsewhere, from the very next token, and the consumer notices nothing.
    """

    __slots__ = (
        "_error",
        "_waiter",
        "_waiting",
        "attempts",
        "chars",
        "created_s",
        "done",
        "emitted",
        "key",
        "messages",
        "model",
        "on_cancel",
        "params",
        "priority",
        "prompt",
        "replica",
        "stream",
        "timer",
        "wire_id",
    )

    def __init__(
        self,
        model: str,
        params: SamplingParams,
        *,
        prompt: str | list[int] | None = None,
        messages: list[ChatMessage] | None = None,
        stream: bool = True,
        key: str = "",
        priority: int = 0,
    ) -> None:
        self.model = model
        self.params = params
        self.prompt = prompt
        self.messages = messages
        self.stream = stream  # False: the consumer is woken once, when all is there
        self.key = key
        self.priority = priority
        self.created_s = time.monotonic()
        self.attempts = 0
        self.emitted: list[int] = []
        self.chars = 0
        self.done = False
        self.replica: Replica | None = None
        self.wire_id = 0
        self.timer: asyncio.TimerHandle | None = None
        self.on_cancel: Callable[[Call], None] | None = None
        self._waiting: Deltas = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- for the consumer

    async def deltas(self) -> Deltas:
        """All that has come since the last time, waiting for it if need be.

        The last delta of all has `finish` set. Raises RequestError if the request failed; call it
        again after neither.
        """
        if not self._waiting and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._waiting:
            deltas, self._waiting = self._waiting, []
            return deltas
        assert self._error is not None
        raise self._error

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas one by one, up to and with the last; cancels the request if left early."""
        try:
            while True:
                for delta in await self.deltas():
                    yield delta
                    if delta.finish is not None:
                        return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """The client is gone, or wants no more: leave the queue, or the engine, at once."""
        if not self.done and self.on_cancel is not None:
            self.on_cancel(self)

    # ---- for the router

    def request(self, wire_id: int) -> Generate:
        """The request as the next worker gets it, continued after what others did."""
        self.wire_id = wire_id
        return Generate(
            wire_id, self.params, self.prompt, self.messages, list(self.emitted), self.chars
        )

    def take(self, delta: Delta) -> None:
        """Pass a delta on; the consumer is woken at once if it streams, else at the end."""
        self.emitted += delta.token_ids
        self.chars += len(delta.text)
        self._waiting.append(delta)
        if delta.finish is not None:
            self.done = True
        if self.stream or self.done:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """End with an error; later deltas and errors are dropped by the router."""
        self.done = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter: Any = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
