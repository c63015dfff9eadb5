"""A request in flight at the gateway: it waits, runs, perhaps on several workers in turn, ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec.structs import replace

from servekit.errors import ClientClosed, DeadlineExceeded, RequestError
from servekit.gateway.http.internal_request import AGAIN
from servekit.gateway.http.request_context import ORIGIN
from servekit.gateway.routing.failures import retry_policy
from servekit.gateway.telemetry.metrics import UNMEASURED
from servekit.protocol import tool_formats
from servekit.protocol.messages import (
    ChatMessage,
    Continuation,
    Delta,
    Generate,
    SamplingParams,
)

#: Marks of thoughts and tool calls in the text of an engine without token ids.
MARKS = frozenset(tool_formats.MARKS)
#: Characters of a prompt that count as a token while the worker has not reported the number.
CHARS_PER_TOKEN = 4
#: Ends of a request whose worker may have read its prompt, or a part of it.
_BROKEN_OFF = (ClientClosed.code, DeadlineExceeded.code)
#: Tasks that run no model.
_COUNTING = ("tokenize", "detokenize")

if TYPE_CHECKING:
    from servekit.gateway.auth.api_key import ApiKey
    from servekit.gateway.routing.failures.suspect_sources import Suspect
    from servekit.gateway.routing.model_queue import ModelQueue
    from servekit.gateway.routing.step_delivery import EndOfTick
    from servekit.gateway.routing.worker_connection import WorkerConnection
    from servekit.gateway.telemetry.metrics import RequestMeter
    from servekit.gateway.telemetry.observer import RequestObserver

_UNTIL: dict[retry_policy.RetryDecision, Literal["proven", "done"]] = {
    retry_policy.RetryDecision.ALONE: "proven",
    retry_policy.RetryDecision.LAST: "done",
}


class Reader(Protocol):
    """A consumer of calls, which runs at the end of each event-loop tick that brings it news."""

    end_of_tick: EndOfTick

    def read_news(self) -> None:
        """Read the news; this must not raise, because the readers behind it would not run."""


class InflightRequest:
    """A request in flight: a worker's output is fed in, and a consumer reads it, or cancels.

    The consumer reads with `async for`, or has a `reader` that calls `collect`. The output ends
    with a delta that has `finish` set. The object keeps the token ids reported so far. If the
    worker dies, another one continues from the very next token, and the consumer does not notice.
    """

    body = b""  # of a `ForwardedRequest`

    __slots__ = (
        "_deltas",
        "_error",
        "_handed_over",
        "_resumed_at",
        "_waiter",
        "alone_until",
        "answered",
        "cache_salt",
        "cached_tokens",
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
        "observers",
        "on_cancel",
        "origin",
        "params",
        "place",
        "priority",
        "prompt",
        "prompt_tokens",
        "reader",
        "repeats",
        "replica",
        "route",
        "session",
        "started_s",
        "stream",
        "suspect",
        "texts",
        "trace",
        "void",
        "wire_id",
    )

    def __init__(
        self,
        model: str,
        params: SamplingParams,
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
        self.started_s = 0.0  # when a worker first took it; 0: not yet
        self.first_s = self.last_s = 0.0  # times of the first token, and of a stream's last
        self.meter: RequestMeter = UNMEASURED  # counts the tokens after the first
        self.observers: tuple[RequestObserver, ...] = ()
        self.trace = ""  # W3C traceparent of the last attempt; "" if not traced
        self.deaths = 0  # in a row, see `retry_policy`
        self.deaths_in_all = 0
        self.alone_until: Literal["", "proven", "done"] = ""  # not "": a suspect; what clears it
        self.suspect: Suspect | None = None  # of the deaths in which it was running
        self.not_before_s = 0.0  # a suspect's earliest start, monotonic
        self.emitted: list[int] = []
        self.chars = 0
        self.answered: list[str] = []  # the text so far, if that is what an engine continues
        self.continuation: Continuation | None = None  # set with the first token
        self.repeats = True  # another worker's answer would begin as this one
        self.least_context = 0  # context tokens that it needs, as far as is known
        self.done = False
        self.place: int | None = None  # queue position, if the consumer follows it
        self.route: ModelQueue | None = None
        self.replica: WorkerConnection | None = None
        self.wire_id = 0
        self.limit_s = math.inf  # time limit from `created_s` on; set by the router
        self.on_cancel: Callable[[InflightRequest], None] | None = None
        self.reader: Reader | None = None  # runs instead of waking a waiter
        self._resumed_at = 0  # number of tokens when this attempt began
        self._handed_over = False  # the consumer has seen some of the answer
        self.texts: list[str] = []  # unread text
        self._deltas: list[Delta] = []  # unread deltas with more than text and tokens
        self.prompt_tokens = self.cached_tokens = 0  # the former include the latter
        self.void = False  # its tokens do not count: it is run again, from its beginning or not
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- for the consumer

    async def next_delta(self) -> Delta:
        """Wait for new output, and return it as one delta.

        The very last delta has `finish` set. Raises RequestError if the request failed. Do not call
        this again after either.
        """
        while (delta := self.collect()) is None:
            await self._wait()
        return delta

    async def _wait(self) -> None:
        """Wait for `wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def has_only_text(self) -> bool:
        """Return whether the unread output is text that has not ended."""
        return not self._deltas and not self.done

    def take_text(self) -> str:
        """Return the unread text, "" if there is none."""
        texts = self.texts
        if not texts:
            return ""
        self._handed_over = True
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        return text

    def collect(self) -> Delta | None:
        """Return the unread output as one delta, without token ids; None if there is none.

        Raises RequestError if the request failed.
        """
        deltas, texts = self._deltas, self.texts
        if not (texts or deltas) or not (self.stream or self.done):
            self._raise()
            return None
        self._handed_over = True
        if not texts:
            return deltas.pop()  # nearly all answers that are not streamed
        text = self.take_text()
        if not deltas:
            tokens, cached = self.prompt_tokens, self.cached_tokens
            return Delta(self.wire_id, text, prompt_tokens=tokens, cached_tokens=cached)
        self._deltas = []
        last = deltas[-1]
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        return replace(last, text=text, logprobs=logprobs, prompt=deltas[0].prompt)

    def _raise(self) -> None:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # breaks the cycle with the traceback's frames

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield the output to its end; leaving early cancels the request."""
        try:
            while True:
                delta = await self.next_delta()
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
    def uses_prompt(self) -> bool:
        """Return whether the tokens of its prompt count as used."""
        return not self.void and (not self.more or self.more.get("task") not in _COUNTING)

    @property
    def answer_tokens(self) -> int:
        """Return the number of tokens of the answer so far that count as used."""
        return 0 if self.void else len(self.emitted)

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
        self.started_s = self.started_s or time.monotonic()
        for observer in self.observers:
            observer.on_sent(self, again=self.wire_id > 0)
        self.wire_id = wire_id
        self._resumed_at = len(self.emitted)
        if self.place is not None:
            self.set_position(None)
        request = Generate(
            wire_id,
            self.params,
            self.prompt,
            self.messages,
            self.emitted,
            self.chars,
            request="" if self.origin is None else self.origin.name,
            trace=self.trace,
            continuation=self.continuation,
            cache_salt=self.cache_salt,
            alone_until=self.alone_until,
        )
        if self.more:
            request = replace(request, **self.more)
        if self.answered:
            request = replace(request, answered="".join(self.answered))
        return request

    def set_position(self, place: int | None) -> None:
        """Set a new queue position, None once the call does not wait, and wake the consumer."""
        self.place = place
        self.wake()

    def feed(self, delta: Delta) -> None:
        """Accept a delta; wake the consumer at once if it streams, else at the end."""
        if delta.continuation is not None:
            self.continuation = delta.continuation
            self.least_context = delta.prompt_tokens + delta.continuation.max_tokens
        if delta.token_ids:
            if not self.first_s:
                self._note_first_token()
            elif self.stream:  # else only the first and the last token are timed
                now_s = time.monotonic()
                self.meter.count_tokens(now_s - self.last_s, 1)
                self.last_s = now_s
            self.emitted += delta.token_ids
        self.chars += len(delta.text)
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        texts, finish = self.texts, delta.finish
        if texts or finish is None or self._deltas:
            texts.append(delta.text)  # else the last delta is all there is, with its text
        if self.continuation is not None and self.continuation.by_text:
            self._keep_answer(delta.text)
        if finish is not None or delta.logprobs or delta.prompt is not None:
            self._deltas.append(delta)
        if finish is not None:
            self._end(finish, delta)
            self.wake()
        elif self.stream:
            self.wake()

    def _note_first_token(self) -> None:
        self.first_s = self.last_s = time.monotonic()
        for observer in self.observers:
            observer.on_first_token(self)

    def _keep_answer(self, text: str) -> None:
        """Keep the text of an answer; one with thoughts or tool calls cannot be continued."""
        if MARKS.isdisjoint(text):
            self.answered.append(text)
        else:
            self.continuation, self.answered = None, []

    def died(self, ran: bool = True) -> retry_policy.RetryDecision:
        """Count a death of the call's worker, and decide what happens to the call.

        `ran` is False if the worker only held the call and had not started it.
        """
        if ran or self._new:
            self.deaths = retry_policy.deaths_in_a_row(self.deaths, self._new)
            self.deaths_in_all += 1
        decided = retry_policy.decide_retry(self.deaths, self.deaths_in_all)
        self.alone_until = _UNTIL.get(decided, "")
        return decided

    def rewind(self) -> bool:
        """Discard the answer so far, to start again; return False if the consumer has seen some."""
        if self._handed_over:
            return False
        self.emitted, self.answered, self.chars = [], [], 0
        self.continuation, self.least_context = None, 0
        self._forget()
        return True

    def _forget(self) -> None:
        self.texts, self._deltas = [], []

    def same_as(self, other: InflightRequest) -> bool:
        """Return whether the content of both requests is the same, whoever sent them."""
        mine = (self.params, self.prompt, self.messages, self.more)
        return mine == (other.params, other.prompt, other.messages, other.more)

    def fail(self, error: RequestError) -> None:
        """End with an error; the router drops later deltas and errors."""
        self._error = error
        if self.origin is not None and self.origin.repeats:
            self.void = error.status in AGAIN
        self._end(error.code, None)
        if not self.stream:
            self._forget()  # a client without streaming gets no partial answer
        self.wake()

    def _end(self, outcome: str, last: Delta | None) -> None:
        self.done = True
        if not self.observers:  # no router has accepted it
            return
        if not self.uses_prompt:
            self.prompt_tokens = self.cached_tokens = 0
        elif outcome in _BROKEN_OFF and self.wire_id and not self.prompt_tokens:
            self.prompt_tokens = self._estimate_prompt()
        for observer in self.observers:
            observer.on_ended(self, outcome, last)
        if self.caller is not None:
            self.caller.on_ended(self, outcome, last)
        if self.origin is not None:
            self.origin.on_ended(self, outcome, last)

    def _estimate_prompt(self) -> int:
        if isinstance(self.prompt, list):
            return len(self.prompt)
        texts = [self.prompt or "", *(message.content or "" for message in self.messages or ())]
        return sum(map(len, texts)) // CHARS_PER_TOKEN

    def wake(self) -> None:
        """Tell the consumer that there is news."""
        reader = self.reader
        if reader is not None:
            if self.done:
                self.reader = None  # breaks a reference cycle
            reader.end_of_tick.add(reader)
            return
        waiter: Any = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class FurtherChoice(InflightRequest):
    """A request for a further answer to the prompt of another one, for which that counts."""

    __slots__ = ()
    uses_prompt = False
