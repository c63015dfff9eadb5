"""Rate limits of requests and tokens per minute to a remote endpoint.

`Window` decides, as a pure function of the sent requests and a clock; `RateLimiter` makes requests
wait for it in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0


@dataclass(slots=True)
class Sent:
    """A sent request. `tokens` is an estimate until the endpoint reports the count."""

    at_s: float
    tokens: int


class Window:
    """The requests sent within the last minute.

    requests in the window   tokens in it, with the next one's   the next one
    < limit                  <= limit                            goes now
    < limit                  > limit, and there are others       waits for the oldest to leave
    < limit                  > limit, alone                      goes now: it would never fit
    = limit                  any                                 waits for the oldest to leave
    """

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        self._most = requests
        self._most_tokens = tokens
        self._sent: deque[Sent] = deque()

    @property
    def limited(self) -> bool:
        return self._most is not None or self._most_tokens is not None

    def wait_s(self, tokens: int, now_s: float) -> float:
        """Return how long a request of `tokens` tokens must wait; 0: it may be sent."""
        while self._sent and self._sent[0].at_s <= now_s - WINDOW_S:
            self._sent.popleft()
        if not self._sent or not (self._is_full or self._overflows(tokens)):
            return 0.0
        return self._sent[0].at_s + WINDOW_S - now_s

    def add(self, tokens: int, now_s: float) -> Sent:
        """Record a request that is sent."""
        sent = Sent(now_s, tokens)
        if self.limited:
            self._sent.append(sent)
        return sent

    @property
    def _is_full(self) -> bool:
        return self._most is not None and len(self._sent) >= self._most

    def _overflows(self, tokens: int) -> bool:
        if self._most_tokens is None:
            return False
        return sum(sent.tokens for sent in self._sent) + tokens > self._most_tokens


class RateLimiter:
    """A queue that admits requests one by one, as the window and the endpoint allow."""

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        self.waiting = 0
        self._window = Window(requests, tokens)
        self._not_before_s = 0.0
        self._turn = asyncio.Lock()  # a fair lock
        self._changed = asyncio.Event()

    async def await_turn(self, tokens: int) -> Sent:
        """Wait until a request of about `tokens` tokens may be sent."""
        loop = asyncio.get_running_loop()
        self.waiting += 1
        try:
            async with self._turn:
                while wait_s := self._wait_s(tokens, loop.time()):
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._changed.wait()
                return self._window.add(tokens, loop.time())
        finally:
            self.waiting -= 1

    async def pause(self, for_s: float) -> None:
        """Let a request wait before its next attempt."""
        self.waiting += 1
        try:
            await asyncio.sleep(for_s)
        finally:
            self.waiting -= 1

    def correct_estimate(self, sent: Sent, tokens: int) -> None:
        """Replace a request's estimate by the count that the endpoint reported."""
        sent.tokens = tokens
        self._changed.set()

    def pause_for(self, for_s: float) -> None:
        """Admit no request for `for_s` seconds, as the endpoint asked."""
        until_s = asyncio.get_running_loop().time() + for_s
        self._not_before_s = max(self._not_before_s, until_s)

    def _wait_s(self, tokens: int, now_s: float) -> float:
        return max(0.0, self._not_before_s - now_s, self._window.wait_s(tokens, now_s))
