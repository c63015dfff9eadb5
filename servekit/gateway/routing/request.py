"""A request in flight at the gateway: it waits, runs, perhaps on several workers in turn, ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from servekit.errors import RequestError
from servekit.gateway.http.request_context import ORIGIN
from servekit.gateway.routing import retry_policy
from servekit.gateway.telemetry import metrics
from servekit.protocol.messages import (
    ChatMessage,
    Continuation,
    Delta,
    Generate,
    SamplingParams,
)

if TYPE_CHECKING:
    from servekit.gateway.auth.api_key import ApiKey
    from servekit.gateway.generation.stream_writer import StreamWriter
    from servekit.gateway.routing.model_queue import ModelQueue
    from servekit.gateway.routing.suspect_sources import Suspect
    from servekit.gateway.routing.worker_connection import WorkerConnection
    from servekit.gateway.telemetry.metrics import RequestMeter

Deltas = list[Delta]
_UNTIL: dict[retry_policy.RetryDecision, Literal["proven", "done"]] = {
    retry_policy.RetryDecision.ALONE: "proven",
    retry_policy.RetryDecision.LAST: "done",
}


class InflightRequest:
    """A request in flight. Its consumer awaits `deltas()` until a delta has `finish` set.

    The object keeps the token ids reported so far. If the worker dies, another one continues from
    the very next token, and the consumer does not notice.
    """

    __slots__ = (
        "_error",
        "_handed_over",
        "_last",
        "_resumed_at",
        "_said",
        "_waiter",
        "_waiting",
        "alone_until",
        "cache_salt",
        "caller",
        "chars",
        "continuation",
        "created_s",
        "deaths",
        "deaths_in_all",
        "done",
        "emitted",
        "first_s",
        "key",
        "last_s",
        "least_context",
        "limit_s",
        "messages",
        "meter",
        "model",
        "more",
        "not_before_s",
        "on_cancel",
        "origin",
        "params",
        "place",
        "priority",
        "prompt",
        "pump",
        "replica",
        "route",
        "session",
        "sink",
        "stream",
        "suspect",
        "texts",
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
        more: dict[str, Any] | None = None,
        session: str = "",
    ) -> None:
        self.model = model
        self.more = more or {}  # further fields of Generate: its task, tools, …
        self.params = params
        self.prompt = prompt
        self.messages = messages
        self.stream = stream  # False: the consumer is woken only once, at the end
        self.key = key
        self.priority = priority
        self.session = session  # calls of one session prefer one replica
        self.origin = ORIGIN.get()  # of the HTTP request that made this call
        self.caller: ApiKey | None = None  # its key, if keys are needed
        self.cache_salt = ""  # only calls with the same salt share prefix caches
        self.created_s = time.monotonic()
        self.first_s = self.last_s = 0.0  # times of the first token, and of a stream's last
        self.meter: RequestMeter = metrics.UNMEASURED
        self.deaths = 0  # in a row, see `retry_policy`
        self.deaths_in_all = 0
        self.alone_until: Literal["", "proven", "done"] = ""  # not "": a suspect; what clears it
        self.suspect: Suspect | None = None  # of the deaths in which it was running
        self.not_before_s = 0.0  # earliest start, monotonic
        self.emitted: list[int] = []
        self.chars = 0
        self.continuation: Continuation | None = None  # set with the first token
        self.least_context = 0  # context tokens that it needs, as far as is known
        self.done = False
        self.place: int | None = None  # queue position, if the consumer follows it
        self.route: ModelQueue | None = None
        self.replica: WorkerConnection | None = None
        self.wire_id = 0
        self.limit_s = math.inf  # time limit from `created_s` on; set by the router
        self.on_cancel: Callable[[InflightRequest], None] | None = None
        self.sink: Callable[[], None] | None = None  # called instead of waking a waiter
        self.pump: StreamWriter | None = None  # to notify, if `sink` only forwards to it
        self._resumed_at = 0  # number of tokens when this attempt began
        self._handed_over = False  # the consumer has seen some of the answer
        self._waiting: Deltas = []
        self.texts: list[str] | None = None  # unread text, for a consumer of text only
        self._last: Delta | None = None  # the delta with `finish`, for the same consumer
        self._said = 0, 0  # prompt tokens, cached prompt tokens
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- for the consumer

    async def deltas(self) -> Deltas:
        """Wait for new deltas and return them.

        The very last delta has `finish` set. Raises RequestError if the request failed. Do not call
        this again after either.
        """
        while not (deltas := self.collect()):
            await self._news()
        return deltas

    def collect(self) -> Deltas:
        """Return the new deltas without waiting, perhaps none. Raises RequestError as `deltas`."""
        if self._waiting and (self.stream or self.done):
            self._handed_over = True
            deltas, self._waiting = self._waiting, []
            return deltas
        self._raise()
        return []

    def read_text(self) -> None:
        """Prepare for a consumer that only calls `collect_text`; to be called before any token."""
        self.texts = []

    def collect_text(self) -> tuple[str, Delta | None] | None:
        """Return the unread text, and the final delta once there is one; None if there is nothing.

        Raises RequestError if the request failed.
        """
        texts = self.texts
        if (texts or self._last is not None) and (self.stream or self.done):
            assert texts is not None
            self._handed_over = True
            last, self._last, self.texts = self._last, None, []
            return texts[0] if len(texts) == 1 else "".join(texts), last
        self._raise()
        return None

    def _raise(self) -> None:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # breaks the cycle with the traceback's frames

    async def place_after(self, seen: int | None) -> int | None:
        """Wait until the queue position differs from `seen`, and return it; None once it runs.

        The position is the number of requests ahead. `Router.follow` turns its updates on.
        """
        while self.place is not None and self.place == seen and not self.done:
            await self._news()
        return None if self.done else self.place

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield the deltas one by one to the last; leaving early cancels the request."""
        try:
            while True:
                for delta in await self.deltas():
                    yield delta
                    if delta.finish is not None:
                        return
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Leave the queue or the engine at once, because the client is gone or wants no more."""
        if not self.done and self.on_cancel is not None:
            self.on_cancel(self)

    # ---- for the router

    @property
    def proven(self) -> bool:
        """Return whether this attempt has shown that the request does not kill workers."""
        return self._new >= retry_policy.PROOF_TOKENS and self.alone_until != "done"

    @property
    def is_choosy(self) -> bool:
        """Return whether only some replicas can run it: by generation, or by context length."""
        return self.continuation is not None or self.least_context > 0

    @property
    def _new(self) -> int:
        """Return the number of tokens from this attempt."""
        return len(self.emitted) - self._resumed_at

    def request(self, wire_id: int) -> Generate:
        """Build the message for the next worker, which continues after the tokens so far."""
        (self.meter.sent_again if self.wire_id else self.meter.sent)(self)
        self.wire_id = wire_id
        self._resumed_at = len(self.emitted)
        if self.place is not None:
            self.tell(None)
        request = Generate(
            wire_id,
            self.params,
            self.prompt,
            self.messages,
            list(self.emitted),
            self.chars,
            request="" if self.origin is None else self.origin.name,
            trace=self.meter.trace,
            continuation=self.continuation,
            cache_salt=self.cache_salt,
        )
        if self.more:
            request = replace(request, **self.more)
        return replace(request, alone_until=self.alone_until) if self.alone_until else request

    def tell(self, place: int | None) -> None:
        """Set a new queue position, None once the call does not wait, and wake the consumer."""
        self.place = place
        self.wake()

    def add(self, text: str, token_id: int) -> None:
        """Add one token for a consumer of deltas."""
        prompt, cached = self._said
        delta = Delta(self.wire_id, text, [token_id], prompt_tokens=prompt, cached_tokens=cached)
        self._waiting.append(delta)

    def take(self, delta: Delta) -> None:
        """Accept a delta; wake the consumer at once if it streams, else at the end."""
        if delta.continuation is not None:
            self.continuation = delta.continuation
            self.least_context = delta.prompt_tokens + delta.continuation.max_tokens
        if delta.token_ids:
            if not self.first_s:
                self.first_s = self.last_s = self.meter.first(self)
            elif self.stream:  # else only the first and the last token are timed
                now_s = time.monotonic()
                self.meter.next(now_s - self.last_s, 1)
                self.last_s = now_s
            self.emitted += delta.token_ids
        self.chars += len(delta.text)
        self._said = delta.prompt_tokens, delta.cached_tokens
        if self.texts is None:
            self._waiting.append(delta)
        elif delta.text:
            self.texts.append(delta.text)
        if delta.finish is not None:
            self.done = True
            self._last = None if self.texts is None else delta
            if delta.times_ns:
                self.meter.worked(delta.times_ns)
            self.meter.ended(self, delta.finish, *self._said, delta.completion_tokens)
            if self.caller is not None:
                self.caller.settle(self, delta)
        if self.stream or self.done:
            self.wake()

    def died(self, ran: bool = True) -> retry_policy.RetryDecision:
        """Count a death of the call's worker, and decide what happens to the call.

        `ran` is False if the worker only held the call and had not started it.
        """
        if ran or self._new:
            self.deaths = retry_policy.deaths_in_a_row(self.deaths, self._new)
            self.deaths_in_all += 1
        decided = retry_policy.fate(self.deaths, self.deaths_in_all)
        self.alone_until = _UNTIL.get(decided, "")
        return decided

    def rewind(self) -> bool:
        """Discard the answer so far, to start again; return False if the consumer has seen some."""
        if self._handed_over:
            return False
        self.emitted, self.chars = [], 0
        self.continuation, self.least_context = None, 0
        self._forget()
        return True

    def _forget(self) -> None:
        self._waiting = []
        if self.texts is not None:
            self.texts = []

    def same_as(self, other: InflightRequest) -> bool:
        """Return whether the content of both requests is the same, whoever sent them."""
        mine = (self.params, self.prompt, self.messages, self.more)
        return mine == (other.params, other.prompt, other.messages, other.more)

    def fail(self, error: RequestError) -> None:
        """End with an error; the router drops later deltas and errors."""
        self.done = True
        self._error = error
        self.meter.ended(self, error.code, *self._said, len(self.emitted))
        if self.caller is not None:
            self.caller.settle(self, None)
        if not self.stream:
            self._forget()  # a client without streaming gets no partial answer
        self.wake()

    def wake(self) -> None:
        """Wake the consumer."""
        sink = self.sink
        if sink is not None:
            if self.done:
                self.sink = self.pump = None  # breaks a reference cycle
            sink()
            return
        waiter: Any = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
