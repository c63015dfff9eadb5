"""Writes a call's tokens into its fast response, at the end of the event-loop tick."""

from __future__ import annotations

from functools import partial
from typing import Any

import structlog

from servekit.errors import ClientClosed, RequestError, ServekitError
from servekit.gateway.generation.openai_encoder import OpenAIEncoder
from servekit.gateway.http.end_of_tick import EndOfTick
from servekit.gateway.http.fast_response import FastResponse
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import Delta

log: Any = structlog.get_logger("servekit.gateway")


class StreamWriter:
    """Writes a call's tokens into its response.

    `whole` and `stream` of `api.openai.endpoints` do the same for ASGI. While the client does not
    read, the text stays in the call, and leaves in one write when the client reads again.
    """

    __slots__ = ("_answer", "_call", "_exchange", "_place", "_places", "_streams", "cork")

    def __init__(
        self, exchange: FastResponse, call: InflightRequest, answer: OpenAIEncoder, cork: EndOfTick
    ) -> None:
        self._exchange = exchange
        self._call = call
        self._answer = answer
        self._streams = False  # the stream has begun
        self._places = False
        self._place: int | None = None  # the last one sent
        self.cork = cork
        call.read_text()
        call.pump = self
        call.sink = partial(cork.add, self)
        exchange.on_writable = self.run
        exchange.on_gone = call.cancel

    def tell_places(self) -> None:
        """Begin the stream now, and send a comment for each new position in the queue."""
        self._exchange.begin_stream()
        self._places = True
        self.run()

    def run(self) -> None:
        """Write new text; called when some has come and when the client reads again.

        Never raises, because the callbacks behind it in `EndOfTick` would not run.
        """
        exchange, call = self._exchange, self._call
        try:
            if self._streams and not call.done:
                if (texts := call.texts) and exchange.open:
                    # the common case: text only
                    if len(texts) == 1:
                        text = texts.pop()
                    else:
                        text = "".join(texts)
                        texts.clear()
                    if text:  # empty for an incomplete character
                        exchange.joined.write_now(self._answer.chunk(text))
                return
            if self._places and exchange.open:
                self._tell_place()
            while exchange.open and (news := self._call.collect_text()) is not None:
                self._pass_on(*news)
                if not self._call.done:
                    return
        except RequestError as error:
            # this runs inside the code that fails the call; its frames hold the error, a cycle
            error.with_traceback(None)
            if not isinstance(error, ClientClosed):
                exchange.fail(error)
        except Exception:
            log.exception("unexpected_error", request=exchange.origin.name)
            exchange.fail(ServekitError("an internal error; see the logs"))
            self._call.cancel()

    def _tell_place(self) -> None:
        place = self._call.place
        if place is None or self._call.done:
            self._places = False
        elif place != self._place:
            self._place = place
            self._exchange.stream(b": queue position %d\n\n" % place, last=False)

    def _pass_on(self, text: str, last: Delta | None) -> None:
        if self._call.stream:
            self._streams = not self._places
            events = self._answer.events(text, last)
            self._exchange.stream(events, last=last is not None, now=True)
        else:
            assert last is not None
            self._exchange.answer(self._answer.whole(text, last))
