"""The stream of a response in the background: its events, as they are stored and gone on with.

A gateway stores the events that it has made together with the tokens they came from. Whoever runs
the response after its death continues from those tokens, and reads the text from its beginning: the
encoder of the new run makes no event for what is stored, and checks that it is the same.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from servekit.errors import RequestError, ServekitError
from servekit.gateway.api.openai.responses_encoder import ResponsesEncoder
from servekit.gateway.api.openai.responses_schema import ResponsesRequest
from servekit.gateway.generation.generation import (
    Generation,
    GenerationChunk,
    GenerationRequest,
)
from servekit.gateway.http.internal_request import AGAIN
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.storage.response_store import StreamPart
from servekit.gateway.tool_parsing import CallArguments, Event, Reasoning, Text, ToolCallStart
from servekit.protocol.messages import Continuation, TokenLogprob

Json = dict[str, Any]
_ENDS = ("response.completed", "response.incomplete", "response.failed")
#: The fields that the response had before it ran.
KEPT = ("id", "created_at", "background", "previous_response_id", "store")
_KINDS: dict[type[Event], str] = {
    Text: "message",
    Reasoning: "reasoning",
    CallArguments: "function_call",
}


class AnswerChanged(RequestError):
    """A response in the background was interrupted, and could not go on with the text that its
    stream had sent. Ask again."""

    status = 503
    code = "answer_changed"


@dataclass
class SentItem:
    """An output item of which events are stored, with its text or arguments so far."""

    item: Json
    text: str = ""
    pieces: list[str] = field(default_factory=list)  # of the text


@dataclass
class BackgroundStream:
    """A run of a response that is streamed in the background.

    `shown` is the response before it ran, `stored` the parts of its stream so far.
    """

    shown: Json
    stored: list[StreamPart]
    exact: bool = True  # go on after the tokens that are stored; else generate all again
    end: Json | None = None  # the response at its end
    error: Json | None = None  # why the run ended early
    call: InflightRequest | None = None
    tokens: list[int] = field(default_factory=list)  # those that are stored
    continuation: Continuation | None = None
    items: list[SentItem] = field(default_factory=list)
    begun: bool = False  # `response.in_progress` is stored
    resumes: bool = False  # the call goes on after the tokens
    next: int = 0  # the number of the next event
    _parts: list[bytes] = field(default_factory=list)  # events that are not stored
    #: For each text that was made into events, the number of the next event and of the tokens read.
    _read: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        for part in self.stored:
            self.next = part.last + 1
            self.tokens += array("i", part.tokens)
            if part.continuation:
                self.continuation = msgspec.msgpack.decode(part.continuation, type=Continuation)
            for event in part.data.split(b"\n\n")[:-1]:
                self._read_event(msgspec.json.decode(event[event.index(b"data: ") + 6 :]))
        self.stored = []
        for item in self.items:
            item.text = "".join(item.pieces)

    def _read_event(self, event: Json) -> None:
        match event["type"]:
            case "response.in_progress":
                self.begun = True
            case "response.output_item.added":
                self.items.append(SentItem(event["item"]))
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.reasoning_summary_text.delta"
                | "response.function_call_arguments.delta"
            ):
                self.items[-1].pieces.append(event["delta"])

    def resume(self, call: InflightRequest) -> None:
        """Let a call go on after the tokens that are stored, if there are any.

        An engine that continues text goes on after that of the events, if they have nothing else.
        """
        began = self.continuation
        if not (self.exact and self.tokens and began is not None):
            return
        if began.by_text:
            kinds = [one.item["type"] for one in self.items]
            if kinds != ["message"] or not self.items[0].text:
                return
            call.answered = [self.items[0].text]
            call.chars = len(self.items[0].text)
        call.emitted, call.continuation = [*self.tokens], began
        self.resumes = True

    def follow(self, call: InflightRequest) -> str:
        """Take the tokens from a call, of which the first text is read.

        Return the text of the events, if the call does not bring it again.
        """
        began, known = self.continuation, len(self.tokens)
        same = self.resumes and call.emitted[:known] == self.tokens
        by_text = began is not None and began.by_text
        if by_text:
            same = same and call.answered[:1] == [self.items[0].text]
        # else it began again: its tokens are not those of the events
        self.call = call if same or not known else None
        return self.items[0].text if same and by_text else ""

    def fail(self, error: Json) -> None:
        """End the stream with an event that has the error."""
        self.end = self.shown | {"status": "failed", "error": error}
        number = self.next + b"".join(self._parts).count(b"\n\n")
        event = {"type": "response.failed", "sequence_number": number, "response": self.end}
        self.add_events(b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(event))

    def note_read(self, next_event: int, tokens: int) -> None:
        """Note how many tokens the text of the events before `next_event` came from."""
        self._read.append((next_event, tokens))

    def add_events(self, events: bytes) -> None:
        """Take whole events, to be stored; some time after they were made."""
        self._parts.append(events)

    def take_part(self) -> StreamPart | None:
        """Return the events since the last call, with the tokens so far; None if there are none.

        The tokens are those of all text in the events, or more; and not more for an engine that
        goes on after the text of the events.
        """
        data = b"".join(self._parts)
        self._parts.clear()
        if not data:
            return None
        first, self.next = self.next, self.next + data.count(b"\n\n")
        tokens, continuation, call = b"", b"", self.call
        if call is not None and (began := call.continuation) is not None:
            read = self._count_read() if began.by_text else len(call.emitted)
            new = call.emitted[len(self.tokens) : read]
            tokens = array("i", new).tobytes()
            if self.continuation is None:
                self.continuation = began
                continuation = msgspec.msgpack.encode(began)
            self.tokens += new
        return StreamPart(first, self.next - 1, data, tokens, continuation)

    def _count_read(self) -> int:
        """Return how many tokens the text of the events so far came from."""
        read = len(self.tokens)
        while self._read and self._read[0][0] <= self.next:
            _, read = self._read.popleft()
        return read


class BackgroundEncoder(ResponsesEncoder):
    """The encoder of a response that is streamed in the background.

    It `_repeats` while the text is what earlier events have told.
    """

    def __init__(
        self, request: ResponsesRequest, size_bytes: int, stream: BackgroundStream
    ) -> None:
        super().__init__(request, size_bytes)
        self.id = stream.shown["id"]
        self._stream = stream
        self._events = stream.next
        self._repeats = bool(stream.items)
        self._chars = 0  # of the last item

    def _describe(self, asked: GenerationRequest, model: str, status: str) -> Json:
        kept = {name: self._stream.shown[name] for name in KEPT}
        return super()._describe(asked, model, status) | kept

    def encode_start(self, generation: Generation) -> bytes:
        if text := self._stream.follow(generation.first):
            b"".join(self._of_event(Text(text), []))
        if self._stream.begun:
            return b""
        self._stream.begun = True
        response = self._response(generation, "in_progress")
        return self._event("response.in_progress", response=response)

    def encode_text(self, generation: Generation, text: str) -> bytes:
        if self._repeats:
            data = b"".join(self._of_event(Text(text), []))
        else:
            data = super().encode_text(generation, text)
        self._stream.note_read(self._events, len(generation.first.emitted))
        return data

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        data = super().encode_chunks(generation, chunks)
        self._stream.note_read(self._events, len(generation.first.emitted))
        return data

    def encode_late_error(self, error: ServekitError) -> bytes | None:
        told = {"code": error.code, "message": error.message}
        self._stream.error = told
        if error.status in AGAIN and not isinstance(error, AnswerChanged):
            return None
        self._repeats = False
        failed = self._stream.shown | {"status": "failed", "error": told}
        return self._event("response.failed", response=failed)

    def _event(self, type: str, **fields: Any) -> bytes:
        if self._repeats:
            return b""
        if type in _ENDS:
            self._stream.end = fields["response"]
        return super()._event(type, **fields)

    # ---- what is stored

    def _of_event(self, event: Event, logprobs: list[TokenLogprob]) -> Iterator[bytes]:
        if not self._repeats:
            yield from super()._of_event(event, logprobs)
            return
        rest: Event | None = None
        if isinstance(event, ToolCallStart):
            yield from super()._of_event(event, logprobs)
        else:
            event, rest = self._split(event)
            yield from super()._of_event(event, logprobs)
            sent = self._stream.items[len(self._output) - 1].text
            begin, self._chars = self._chars, self._chars + len(event.text)
            if sent[begin : self._chars] != event.text:
                raise _changed()
        last = self._stream.items[-1]
        if len(self._output) == len(self._stream.items) and self._chars == len(last.text):
            self._repeats = False
        if rest is not None:
            yield from super()._of_event(rest, [])

    def _split(
        self, event: Text | Reasoning | CallArguments
    ) -> tuple[Text | Reasoning | CallArguments, Event | None]:
        """Split the text of an event where the stored text ends."""
        same = self._open and self._item["type"] == _KINDS[type(event)]
        if len(self._output) + (not same) < len(self._stream.items):
            return event, None
        room = len(self._stream.items[-1].text) - (self._chars if same else 0)
        if len(event.text) <= room:
            return event, None
        return (
            msgspec.structs.replace(event, text=event.text[:room]),
            msgspec.structs.replace(event, text=event.text[room:]),
        )

    def _add(self, item: Json) -> Iterator[bytes]:
        if self._repeats:
            place = len(self._output)
            if place == len(self._stream.items):
                raise _changed()
            sent = self._stream.items[place].item
            if any(item.get(name) != sent.get(name) for name in ("type", "name")):
                raise _changed()
            item |= {name: sent[name] for name in ("id", "call_id") if name in sent}
            self._chars = 0
        yield from super()._add(item)

    def _close(self, status: str) -> Iterator[bytes]:
        if self._repeats and self._open:
            place = len(self._output)
            ends = self._chars == len(self._stream.items[place - 1].text)
            if place == len(self._stream.items) or not ends:
                raise _changed()
        yield from super()._close(status)


def _changed() -> AnswerChanged:
    return AnswerChanged(
        "the response was interrupted, and the model did not go on with the same text; ask again"
    )
