"""uvicorn's HTTP/1.1 protocol with a fast path for hot routes and joined writes."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from servekit.errors import ClientClosed, RequestError
from servekit.gateway.http.asgi import Envelope, Header, too_large
from servekit.gateway.http.limits import LimitedProtocol
from servekit.gateway.http.response import CoalescingTransport, FastHandler, FastResponse
from servekit.gateway.telemetry.metrics import OTHER
from servekit.gateway.telemetry.request_recorder import RECORDER

if TYPE_CHECKING:
    from servekit.gateway.auth.api_key import ApiKey

#: Longer heads are not kept: each connection keeps one, and clients may be malicious.
MOST_BYTES = 8 * 1024
_END = b"\r\n\r\n"
_length = re.compile(rb"\r\ncontent-length: ?(\d{1,10})(?=\r\n)", re.IGNORECASE)
#: Requests with different heads after which a connection's heads are not compared any more.
OTHER_HEADS = 8


class Head(NamedTuple):
    """A request head, split around the digits of its content-length.

    A client that keeps its connection sends the same head again and again; only the body's length
    changes. A head that is otherwise the same, byte for byte, has been parsed and checked before,
    so the next request is recognised by it without parsing.
    """

    before: bytes
    after: bytes  # including the empty line

    @classmethod
    def parse(cls, data: bytes) -> Head | None:
        """Return the head of `data` if that is exactly one complete request, else None."""
        end = data.find(_END) + len(_END)
        found = _length.search(data, 0, end)
        if found is None or end > MOST_BYTES or end + int(found[1]) != len(data):
            return None
        if _length.search(data, found.end(), end) is not None:
            return None
        return cls(data[: found.start(1)], data[found.end(1) : end])

    def body_of(self, data: bytes) -> bytes | None:
        """Return the body of `data` if that is one complete request with this head, else None."""
        before, after = self
        if not data.startswith(before):
            return None
        begin = len(before)
        at = data.find(b"\r", begin, begin + 11)
        if at <= begin or not data.startswith(after, at):
            return None
        digits, end = data[begin:at], at + len(after)
        if not digits.isdigit() or int(digits) != len(data) - end:
            return None
        return data[end:]


class Http(LimitedProtocol):
    """uvicorn's protocol, except that a plain POST to a path in `hot` becomes a `FastResponse`."""

    leaving: ClassVar[bool] = False  # close each connection after its next response

    def __init__(
        self,
        *args: Any,
        hot: Mapping[bytes, FastHandler],
        max_body_bytes: int,
        answers: defaultdict[Any, int] | None = None,
        envelopes: Mapping[str, Envelope] | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the protocol.

        `answers` counts the responses of hot routes, by path and status. `envelopes` has, by path,
        the formats of their errors other than OpenAI's.
        """
        super().__init__(*args, **kwargs)
        self.envelopes = envelopes or {}
        self.answers = defaultdict(int) if answers is None else answers
        self.max_body_bytes = max_body_bytes
        self._hot = hot
        # the last fast response; `cycle` may be a later, pipelined request
        self._exchange: FastResponse | None = None
        self._head: Head | None = None  # of the last parsed request
        self._other_heads = 0  # requests in a row whose head was not the one before
        #: The holder of the key in the headers, and the callers among which it was found.
        self.holder: tuple[Mapping[str, ApiKey], ApiKey] | None = None
        self._within = False  # a message has begun and is incomplete
        self._idle_since_s = 0.0  # end of the last fast response; 0 once data comes
        self._heads: dict[Any, bytes] = {}
        self._heads_of: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.joined = CoalescingTransport(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, self.joined))

    # ---- requests with a known head

    def data_received(self, data: bytes) -> None:
        self._idle_since_s = 0.0
        head = self._head
        if head is not None:
            if (body := head.body_of(data)) is not None and self._start_with_known_head(body):
                self._other_heads = 0
                return
            self._head = None
            self._other_heads += 1
        before, at_start = self._exchange, not self._within
        super().data_received(data)
        known_to_differ = self._other_heads >= OTHER_HEADS
        if at_start and self._exchange is not before and not (self._within or known_to_differ):
            self._head = Head.parse(data)

    def _start_with_known_head(self, body: bytes) -> bool:
        """Start a complete request with the previous head; return False if that is not allowed."""
        cycle: Any = self.cycle
        handler = self._hot.get(self.url)
        if (
            handler is None
            or self._within
            or self._header_bytes  # a refused request is still being sent
            or (cycle is not None and not cycle.response_complete)
            or self.flow.write_paused
            or len(body) > self.max_body_bytes
        ):
            return False
        exchange: Any = FastResponse(self, handler)
        self._exchange = self.cycle = exchange
        exchange.body = body
        exchange.begin_with(handler)
        return True

    def refuse(self, error: RequestError) -> None:
        self.answers[self.url if self.url in self._hot else OTHER, error.status] += 1
        super().refuse(error)

    def answered(self) -> None:
        """Finish a fast response as uvicorn's `on_response_complete` does, but without a timer."""
        if self.pipeline:
            self.on_response_complete()
        elif not self.transport.is_closing():
            self.server_state.total_requests += 1
            if self.flow.read_paused:
                self.flow.resume_reading()
            self._idle_since_s = self.loop.time()

    def sweep(self, now_s: float) -> None:
        super().sweep(now_s)
        if self._idle_since_s and now_s - self._idle_since_s > self.timeout_keep_alive:
            self.timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.disconnected, exchange.open = True, False
            if isinstance(cast(Any, self.cycle), FastResponse):
                # breaks a reference cycle, which the garbage collector would find late
                self.cycle = cast(Any, None)
            gone = exchange.on_gone
            exchange.on_gone = exchange.on_writable = None  # breaks a reference cycle, too
            if gone is not None:
                gone()
            if not exchange.response_complete:
                RECORDER.note(exchange.path, ClientClosed.status, exchange.origin)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._exchange is not None:
            self._exchange.open = False

    def resume_writing(self) -> None:
        super().resume_writing()
        exchange = self._exchange
        if exchange is not None and not (exchange.response_complete or exchange.disconnected):
            exchange.open = True
            if exchange.on_writable is not None:
                exchange.on_writable()

    def head(self, status: int, headers: tuple[Header, ...]) -> bytes:
        """Return the status line and headers, cached until the server's own (the date) change."""
        defaults = self.server_state.default_headers
        if defaults is not self._heads_of:
            self._heads, self._heads_of = {}, defaults
        key = (status, headers)
        head = self._heads.get(key)
        if head is None:
            lines = b"".join(b"%b: %b\r\n" % pair for pair in (*defaults, *headers))
            head = self._heads[key] = STATUS_LINE[status] + lines
        return head

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        self._within = True
        super().on_message_begin()

    def message_ends(self) -> None:
        self._within = False
        super().message_ends()

    def on_headers_complete(self) -> None:
        handler = self._hot.get(self.url)
        if handler is None or not self._is_plain():
            super().on_headers_complete()
            return
        self.header_ends()
        self.holder = None
        exchange: Any = FastResponse(self, handler)
        self._exchange = self.cycle = exchange
        declared = self.headers_by_name.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            exchange.send_error(too_large(self.max_body_bytes))

    def _is_plain(self) -> bool:
        parser = self.parser
        return (
            parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused  # the ASGI path waits for a slow client
        )

    def on_body(self, body: bytes) -> None:
        self.body_goes_on(len(body))
        exchange: Any = self.cycle
        if not isinstance(exchange, FastResponse):
            super().on_body(body)
        elif not exchange.response_complete:
            exchange.receive(body)

    def on_message_complete(self) -> None:
        if self.upgrades:  # the request will be parsed again
            return
        self.message_ends()
        exchange: Any = self.cycle
        if not isinstance(exchange, FastResponse):
            super().on_message_complete()
        elif not exchange.response_complete:
            exchange.begin()
        else:  # refused before it was complete
            self._idle_since_s = self.loop.time()
