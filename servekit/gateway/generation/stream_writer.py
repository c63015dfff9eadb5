"""Writes a generation into its response, whole or streamed: the same way for all APIs and models.

An API's `ResponseEncoder` makes the bytes. A `StreamWriter` decides when: at the end of an
event-loop tick that brought news, all of it in one write, and only while the client reads.
"""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from servekit.errors import ClientClosed, RequestError, ServekitError
from servekit.gateway.generation.generation import (
    Choice,
    ChoiceStream,
    Generation,
    GenerationChunk,
)
from servekit.gateway.http.asgi import EVENT_STREAM, Header, envelope
from servekit.gateway.http.response import Response
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.tool_parsing import Text

_encode = msgspec.json.Encoder().encode
log: Any = structlog.get_logger("servekit.gateway")


class ResponseEncoder:
    """The answer format of an API. This base class has OpenAI's errors and server-sent events."""

    headers: tuple[Header, ...] = EVENT_STREAM
    #: The bytes around a text's JSON in `encode_text`, if they stay the same after `encode_start`.
    frame: tuple[bytes, bytes] | None = None

    def encode_response(self, generation: Generation, choices: list[Choice]) -> bytes:
        """Return the JSON body of an answer that is not streamed."""
        raise NotImplementedError

    def encode_start(self, generation: Generation) -> bytes:
        """Return the bytes that open a stream, sent with its first events."""
        return b""

    def encode_text(self, generation: Generation, text: str) -> bytes:
        """Return the stream's bytes for new text of the only choice, after its first events.

        Nearly all tokens come this way.
        """
        if self.frame is None:
            return self.encode_chunks(generation, [GenerationChunk(0, [Text(text)])])
        before, after = self.frame
        return b"".join((before, _encode(text), after))

    def encode_chunks(self, generation: Generation, chunks: list[GenerationChunk]) -> bytes:
        """Return the stream's bytes for some chunks, final chunks included."""
        raise NotImplementedError

    def encode_end(self, generation: Generation) -> bytes:
        """Return the bytes that end a successful stream."""
        return b""

    def encode_late_error(self, error: ServekitError) -> bytes | None:
        """Return the bytes that end a failed stream; None to disconnect."""
        return b"data: " + envelope(error) + b"\n\n"


class StreamWriter:
    """The writer of one response. While the client does not read, the output stays in the calls."""

    __slots__ = (
        "_call",
        "_encoder",
        "_ended",
        "_frame",
        "_generation",
        "_only",
        "_opened",
        "_place",
        "_response",
        "end_of_tick",
    )

    def __init__(
        self, response: Response, generation: Generation, encoder: ResponseEncoder
    ) -> None:
        self._response = response
        self._generation = generation
        self._encoder = encoder
        self.end_of_tick = generation.end_of_tick
        self._opened = self._ended = False
        # Set once the stream of an only choice is opened. All streams of a step are written one
        # after the other, so each object that a token does not touch spares a cache miss.
        self._only: ChoiceStream | None = None
        self._call: InflightRequest | None = None
        self._frame: tuple[bytes, bytes] | None = None  # if its text is the answer as it is
        self._place: int | None = None  # the last queue position sent
        generation.read_by(self)
        response.on_writable = self.read_news
        response.on_gone = generation.cancel
        if generation.request.follow and generation.request.stream:
            response.begin_stream(encoder.headers)
            self.read_news()

    def read_news(self) -> None:
        """Write the news; called when some has come, and when the client reads again.

        Never raises, because the readers behind it in `EndOfTick` would not run.
        """
        try:
            call = self._call
            if call is not None and not call.done:
                # written out: nearly all tokens come this way
                if (texts := call.texts) and (response := self._response).is_writable:
                    if len(texts) == 1:
                        text = texts.pop()
                    else:
                        text = "".join(texts)
                        texts.clear()
                    if not text:  # for an incomplete character
                        return
                    if (frame := self._frame) is not None:
                        response.write(b"".join((frame[0], _encode(text), frame[1])))
                    else:
                        response.write(self._encode(text))
            elif self._generation.request.stream:
                self._write_stream()
            elif (
                self._response.is_writable
                and (choices := self._generation.collect_whole()) is not None
            ):
                body = self._encoder.encode_response(self._generation, choices)
                self._response.send_json(body)
        except RequestError as error:
            # this may run inside the code that fails the call; its frames hold the error, a cycle
            self._fail(error.with_traceback(None))
        except Exception:
            origin = self._generation.first.origin
            log.exception("unexpected_error", request="" if origin is None else origin.name)
            self._fail(ServekitError("an internal error; see the logs"))

    def _write_stream(self) -> None:
        response, generation = self._response, self._generation
        if generation.request.follow and response.is_writable:
            self._tell_place()
        while response.is_writable and (chunks := generation.collect()):
            opening = b"" if self._opened else self._open()
            data = opening + self._encoder.encode_chunks(generation, chunks)
            if done := generation.done:
                data += self._encoder.encode_end(generation)
            response.write(data, last=done)

    def _encode(self, text: str) -> bytes:
        """Encode new text of the only choice."""
        assert self._only is not None
        if self._only.parser is None:
            return self._encoder.encode_text(self._generation, text)
        events = self._only.parse(text)
        if len(events) == 1 and type(event := events[0]) is Text:
            return self._encoder.encode_text(self._generation, event.text)
        return self._encoder.encode_chunks(self._generation, [GenerationChunk(0, events)])

    def _open(self) -> bytes:
        self._opened = True
        if not self._response.response_started:
            self._response.begin_stream(self._encoder.headers)
        opening = self._encoder.encode_start(self._generation)
        if (only := self._generation.only) is not None:
            self._only, self._call = only, only.call
            self._frame = self._encoder.frame if only.parser is None else None
        return opening

    def _tell_place(self) -> None:
        place = self._generation.place
        if place is not None and place != self._place:
            self._place = place
            self._response.write(b": queue position %d\n\n" % place)

    def _fail(self, error: ServekitError) -> None:
        if self._ended:
            return
        self._ended = True
        self._generation.cancel()
        if isinstance(error, ClientClosed):
            return
        if not self._response.response_started:
            self._response.send_error(error)
        elif (event := self._encoder.encode_late_error(error)) is not None:
            self._response.write(event, last=True)
        else:
            self._response.abort_stream()
