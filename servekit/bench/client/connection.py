"""A kept-alive HTTP/1.1 connection of a client, and its exchanges, in raw asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httptools
import msgspec

from servekit.bench.client.client_protocol import Outcome, Record
from servekit.bench.client.response_schemas import decode_answer, message_of, text_of
from servekit.bench.percentiles import bucket_of
from servekit.sse import EventStream

#: Maximum bytes of an answer without streaming; vectors may be long.
_LONGEST_BODY_BYTES = 256 * 2**20


class Exchange:
    """A request and its answer so far."""

    __slots__ = (
        "body", "done", "events", "gaps", "record", "reused", "size_bytes", "status", "texts",
        "whole",
    )  # fmt: skip

    def __init__(self, began: float, done: Callable[[Exchange], None], *, keep_text: bool) -> None:
        self.record = Record("unfinished", began, began)
        self.done = done
        self.status = 0
        self.events: EventStream | None = None  # for a streamed answer
        self.body: list[bytes] = []
        self.size_bytes = 0  # of the body
        self.texts: list[str] | None = [] if keep_text else None
        self.gaps: list[float] = []
        self.whole = False  # the answer is complete: a finish reason or [DONE]
        self.reused = False  # its connection had been used before

    @property
    def answered(self) -> bool:
        """Return whether any byte of an answer has arrived."""
        return self.status != 0

    @property
    def text(self) -> str:
        return "".join(self.texts or ())

    def end_exchange(self, outcome: Outcome, message: str = "", now: float | None = None) -> None:
        record = self.record
        record.outcome, record.message = outcome, message
        record.status = self.status
        record.ended = time.monotonic() if now is None else now

    def take_events(self, events: list[bytes], now: float) -> str:
        """Read events; return the error that they contain, or ""."""
        for event in events:
            if event == b"[DONE]":
                self.whole = True
                continue
            answer = decode_answer(event)
            if answer.choices:
                for choice in answer.choices:
                    text, brings = text_of(choice)
                    if brings:
                        self._on_chunk(text, now)
                    if choice.finish_reason:
                        self.whole = True
            if answer.failed:
                return message_of(event)
            if answer.usage is not None:
                self.record.prompt_tokens = answer.usage.prompt_tokens
                self.record.output_tokens = answer.usage.completion_tokens
        return ""

    def _on_chunk(self, text: str, now: float) -> None:
        record = self.record
        record.chunks += 1
        if record.last is None:
            record.first = now
        else:
            self.gaps.append(now - record.last)
        record.last = now
        if self.texts is not None:
            self.texts.append(text)

    def take_whole(self) -> Outcome:
        """Read an answer without streaming."""
        body = b"".join(self.body)
        answer = decode_answer(body)
        if answer.failed:
            self.record.message = message_of(body)
            return "frame"
        if answer.usage is not None:
            self.record.prompt_tokens = answer.usage.prompt_tokens
            self.record.output_tokens = answer.usage.completion_tokens
        if self.texts is not None and answer.choices:
            self.texts.append(text_of(answer.choices[0])[0])
        return "ok" if answer.is_answer else "protocol"

    def count_gaps(self, counts: dict[int, int]) -> None:
        """Add the gaps between its chunks to a histogram's counts."""
        for gap in self.gaps:
            bucket = bucket_of(gap)
            counts[bucket] = counts.get(bucket, 0) + 1
        self.record.longest_gap_s = max(self.gaps, default=0.0)


class Connection(asyncio.Protocol):
    """A connection with one request at a time; ends the exchange when the answer is complete or
    failed.
    """

    def __init__(self, freed: Callable[[Connection], None]) -> None:
        self._freed = freed  # called when it is free again, before the exchange's `done`
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._pieces: list[bytes] = []  # of the body, in this read
        self._streams = self._sized = self._complete = self._keeps = False
        self.closed = False
        self.used = False

    def send_request(self, request: bytes, exchange: Exchange) -> None:
        assert self._transport is not None
        exchange.reused, self.used = self.used, True
        self._exchange = exchange
        self._complete = False
        self._transport.write(request)

    def abort(self) -> None:
        """Close at once, without notice to the exchange."""
        self.closed, self._exchange = True, None
        if self._transport is not None:
            self._transport.abort()

    def give_up(self, outcome: Outcome, message: str) -> None:
        """Fail the current exchange, and close the connection."""
        exchange = self._exchange
        self.abort()
        if exchange is not None:
            exchange.end_exchange(outcome, message)
            exchange.done(exchange)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.give_up("protocol", f"not HTTP: {error}")
            return
        if self._pieces or self._complete or self._exchange is None:
            self._digest()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._exchange is None:
            self._freed(self)
        elif self._exchange.answered and not self._sized and exc is None and not self._complete:
            self._complete = True  # as in HTTP/1.0: EOF ends the answer
            self._digest()
        else:
            self.give_up("cut", f"the connection was lost: {exc or 'it was closed'}")

    # ---- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered == b"content-type":
            self._streams = value.lower().startswith(b"text/event-stream")
        elif lowered in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_message_begin(self) -> None:
        if not self._complete:
            self._streams = self._sized = False

    def on_headers_complete(self) -> None:
        if self._exchange is None or self._complete:
            return
        self._exchange.status = self._parser.get_status_code()
        if self._streams and self._exchange.status == 200:
            self._exchange.events = EventStream()

    def on_body(self, body: bytes) -> None:
        if not self._complete:  # else an unexpected second answer
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # else an interim response
            self._keeps = self._parser.should_keep_alive() and not self._complete
            self._complete = True

    # ---- the answer

    def _digest(self) -> None:
        """Process the parts of the body that one read of the socket brought, all at once."""
        exchange, pieces, self._pieces = self._exchange, self._pieces, []
        if exchange is None:
            self.abort()  # unexpected bytes
            return
        now = time.monotonic()
        try:
            problem = self._read(exchange, pieces, now)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.give_up("protocol", f"not an answer of OpenAI's API: {error}")
            return
        if problem:
            self.give_up("frame", problem)
        elif self._complete:
            self._finish(exchange, now)

    def _read(self, exchange: Exchange, pieces: list[bytes], now: float) -> str:
        if exchange.events is None:
            exchange.body += pieces
            exchange.size_bytes += sum(map(len, pieces))
            if exchange.size_bytes > _LONGEST_BODY_BYTES:
                raise msgspec.DecodeError("it is too long")
            return ""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return exchange.take_events(exchange.events.read_events(data), now)

    def _finish(self, exchange: Exchange, now: float) -> None:
        outcome, message = self._verdict(exchange)
        exchange.end_exchange(outcome, message, now)
        self._exchange = None
        if self.closed or not (self._sized and self._keeps):
            self.abort()
        self._freed(self)
        exchange.done(exchange)

    def _verdict(self, exchange: Exchange) -> tuple[Outcome, str]:
        if exchange.status != 200:
            return "http", message_of(b"".join(exchange.body))
        if exchange.events is not None:
            return ("ok", "") if exchange.whole else ("cut", "the stream ended without an end")
        try:
            outcome = exchange.take_whole()
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return "protocol", f"not an answer of OpenAI's API: {error}"
        if outcome == "protocol":
            return outcome, "not an answer of OpenAI's API: it has neither choices nor data"
        return outcome, exchange.record.message
