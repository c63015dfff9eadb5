"""One request's life at the gateway: it waits, runs, perhaps on several workers in turn, ends."""

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
    """A request on its way. Its consumer awaits `deltas()` until one has `finish` set.

    The Call keeps the token ids reported so far: a worker that dies leaves enough behind to go on
    elsewhere, from the very next token, and the consumer notices nothing.
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
        self.stream = stream  # False: the consumer is woken once, when all is there
        self.key = key
        self.priority = priority
        self.session = session  # calls of one go to one replica, as far as that is good
        self.origin = ORIGIN.get()  # the HTTP request that it is of
        self.caller: ApiKey | None = None  # whose key it came with, where keys are needed
        self.cache_salt = ""  # it shares prefix caches with calls of the same one
        self.created_s = time.monotonic()
        self.first_s = self.last_s = 0.0  # when its first token came, and of a stream the last
        self.meter: RequestMeter = metrics.UNMEASURED
        self.deaths = 0  # in a row, see `gateway.fate`
        self.deaths_in_all = 0
        self.alone_until: Literal["", "proven", "done"] = ""  # it is a suspect; what clears it
        self.suspect: Suspect | None = None  # of deaths that it was running in
        self.not_before_s = 0.0  # it waits until then, on the monotonic clock
        self.emitted: list[int] = []
        self.chars = 0
        self.continuation: Continuation | None = None  # from its first token on
        self.least_context = 0  # tokens of context that it takes, as far as that is known
        self.done = False
        self.place: int | None = None  # in the queue, where its consumer follows that
        self.route: ModelQueue | None = None
        self.replica: WorkerConnection | None = None
        self.wire_id = 0
        self.limit_s = math.inf  # from `created_s` on, waiting included; the router sets it
        self.on_cancel: Callable[[InflightRequest], None] | None = None
        self.sink: Callable[[], None] | None = None  # called where a waiter would be woken
        self.pump: StreamWriter | None = None  # whom the sink tells, where that is all it does
        self._resumed_at = 0  # tokens there were when this attempt began
        self._handed_over = False  # the consumer has seen something of it
        self._waiting: Deltas = []
        self.texts: list[str] | None = None  # what waits, for a consumer of text alone
        self._last: Delta | None = None  # for the same, with `finish`
        self._said = 0, 0  # tokens of the prompt, and those of them from a cache
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- for the consumer

    async def deltas(self) -> Deltas:
        """All that has come since the last time, waiting for it if need be.

        The last delta of all has `finish` set. Raises RequestError if the request failed; call it
        again after neither.
        """
        while not (deltas := self.collect()):
            await self._news()
        return deltas

    def collect(self) -> Deltas:
        """What `deltas` would return by now, without waiting: perhaps nothing."""
        if self._waiting and (self.stream or self.done):
            self._handed_over = True
            deltas, self._waiting = self._waiting, []
            return deltas
        self._raise()
        return []

    def read_text(self) -> None:
        """The consumer wants text, and the last delta: it calls `collect_text` from the start."""
        self.texts = []

    def collect_text(self) -> tuple[str, Delta | None] | None:
        """As `collect`: all text that waits, and the last delta of all once it is there."""
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
                self._error = None  # or its traceback's frames hold this call, and it them

    async def place_after(self, seen: int | None) -> int | None:
        """The place in the queue once it is not `seen` any more; None once it does not wait.

        A place is how many requests go before it. `Router.follow` has the places told.
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

    @property
    def proven(self) -> bool:
        """This attempt has shown that the request is not what kills workers."""
        return self._new >= retry_policy.PROOF_TOKENS and self.alone_until != "done"

    @property
    def is_choosy(self) -> bool:
        """Only some replicas can run it: those that go on as it began, or have the room."""
        return self.continuation is not None or self.least_context > 0

    @property
    def _new(self) -> int:
        """Tokens that this attempt has brought."""
        return len(self.emitted) - self._resumed_at

    def request(self, wire_id: int) -> Generate:
        """The request as the next worker gets it, continued after what others did."""
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
        """Its place in the queue is another one now; None: it does not wait any more."""
        self.place = place
        self.wake()

    def add(self, text: str, token_id: int) -> None:
        """Keep one more token for a consumer of deltas."""
        prompt, cached = self._said
        delta = Delta(self.wire_id, text, [token_id], prompt_tokens=prompt, cached_tokens=cached)
        self._waiting.append(delta)

    def take(self, delta: Delta) -> None:
        """Pass a delta on; the consumer is woken at once if it streams, else at the end."""
        if delta.continuation is not None:
            self.continuation = delta.continuation
            self.least_context = delta.prompt_tokens + delta.continuation.max_tokens
        if delta.token_ids:
            if not self.first_s:
                self.first_s = self.last_s = self.meter.first(self)
            elif self.stream:  # of what is not, only the first and the last matter
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
        """Its worker died; what is to become of it. `ran`: it wasn't merely held there."""
        if ran or self._new:
            self.deaths = retry_policy.deaths_in_a_row(self.deaths, self._new)
            self.deaths_in_all += 1
        decided = retry_policy.fate(self.deaths, self.deaths_in_all)
        self.alone_until = _UNTIL.get(decided, "")
        return decided

    def rewind(self) -> bool:
        """Forget what has been generated, to begin anew; False if some of it is out already."""
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
        """The same request, by whomever."""
        mine = (self.params, self.prompt, self.messages, self.more)
        return mine == (other.params, other.prompt, other.messages, other.more)

    def fail(self, error: RequestError) -> None:
        """End with an error; later deltas and errors are dropped by the router."""
        self.done = True
        self._error = error
        self.meter.ended(self, error.code, *self._said, len(self.emitted))
        if self.caller is not None:
            self.caller.settle(self, None)
        if not self.stream:
            self._forget()  # half an answer is none
        self.wake()

    def wake(self) -> None:
        """Something is there for the consumer."""
        sink = self.sink
        if sink is not None:
            if self.done:
                self.sink = self.pump = None  # they hold this call, and wait for the collector
            sink()
            return
        waiter: Any = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
