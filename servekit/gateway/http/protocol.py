"""uvicorn's HTTP/1.1 protocol with a fast path for hot routes and joined writes."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from servekit.errors import ClientClosed, RequestError
from servekit.gateway.http.asgi import Envelope, Header, encode_error, too_large
from servekit.gateway.http.limits import LimitedProtocol
from servekit.gateway.http.response import CoalescingTransport, FastHandler, FastResponse
from servekit.gateway.telemetry.metrics import OTHER
from servekit.gateway.telemetry.request_recorder import RECORDER

if TYPE_CHECKING:
    from servekit.gateway.auth.api_key import ApiKey

#: Longer heads are not kept, and as many heads are at most: clients may be malicious.
MOST_BYTES, MOST_HEADS = 8 * 1024, 256
_END = b"\r\n\r\n"
_length = re.compile(rb"\r\ncontent-length: ?(\d{1,10})(?=\r\n)", re.IGNORECASE)
#: Requests in a row with unknown heads after which a connection's heads are only looked up seldom:
#: each of them has something of its own, such as an id.
OTHER_HEADS, SELDOM = 8, 32
#: Bytes that are parsed at once, apart from bodies. What comes behind a pipelined request is parsed
#: once that is answered: a request takes sixty times its bytes in memory.
SLICE_BYTES = 16 * 1024


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
        end = data.find(_END, 0, MOST_BYTES) + len(_END)
        found = _length.search(data, 0, end)
        if found is None or end + int(found[1]) != len(data):
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


class KnownHead:
    """A head with the results of parsing it. Connections with the same head share them."""

    __slots__ = ("head", "headers", "headers_by_name", "holder", "url")

    def __init__(self, head: Head, parsed: LimitedProtocol) -> None:
        self.head = head
        self.url = parsed.url
        self.headers = parsed.headers
        self.headers_by_name = parsed.headers_by_name
        #: The holder of the key in the headers, and the callers among which it was found.
        self.holder: tuple[Mapping[str, ApiKey], ApiKey] | None = None


class _Flow(FlowControl):
    """uvicorn's flow control, except that nothing is read while bytes are held."""

    holds = False

    def resume_reading(self) -> None:
        if not self.holds:
            super().resume_reading()


class Http(LimitedProtocol):
    """uvicorn's protocol, except that a plain POST to a path in `hot` becomes a `FastResponse`."""

    leaving: ClassVar[bool] = False  # close each connection after its next response
    known_heads: ClassVar[dict[Head, KnownHead]] = {}  # of all connections, the oldest first

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
        self._known: KnownHead | None = None  # of the last request
        self._unknown_heads = 0  # requests in a row whose head was unknown
        #: The holder of the key in the headers, and the callers among which it was found.
        self.holder: tuple[Mapping[str, ApiKey], ApiKey] | None = None
        self._within = False  # a message has begun and is incomplete
        self._held = b""  # received behind a pipelined request, and not parsed yet
        self._idle_since_s = 0.0  # end of the last fast response; 0 once data comes
        self._heads: dict[Any, bytes] = {}
        self._heads_of: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.joined = CoalescingTransport(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, self.joined))
        self.flow: _Flow = _Flow(cast(asyncio.Transport, self.joined))

    # ---- requests with a known head

    def data_received(self, data: bytes) -> None:
        if self._held or self.pipeline:
            self._hold(data)
            return
        self._idle_since_s = 0.0
        head, known = None, self._known
        if known is not None:
            if (body := known.head.body_of(data)) is not None and self._start_with_known_head(body):
                self._unknown_heads = 0
                return
            known.holder, self._known = self.holder, None
        if not self._within:
            unknown = self._unknown_heads = self._unknown_heads + 1
            if unknown <= OTHER_HEADS or not unknown % SELDOM:
                head = Head.parse(data)
            if head is not None and self._start_with_other_head(head, data):
                return
        before, at = self._exchange, 0
        while at < len(data):  # nearly always once
            if self.pipeline:
                self._hold(data[at:])
                break
            end = at + max(SLICE_BYTES, self._body_left_bytes())
            super().data_received(data[at:end])
            at = end
        if head is not None and self._exchange is not before and not self._within:
            self._keep_head(head)

    def _body_left_bytes(self) -> int:
        """Return how much of the body is to come; 0 if that is not known."""
        length = self.headers_by_name.get(b"content-length", b"") if self._body_comes else b""
        return int(length) - self._content_bytes if length.isdigit() else 0

    def _hold(self, data: bytes) -> None:
        """Keep bytes until no parsed request waits any more, and read none meanwhile."""
        self._held += data
        self.flow.pause_reading()
        self.flow.holds = True

    def _parse_held(self) -> None:
        if not self._held or self.pipeline or self.transport.is_closing():
            return
        data, self._held, self.flow.holds = self._held, b"", False
        self.flow.resume_reading()
        self.data_received(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held:
            self.loop.call_soon(self._parse_held)  # this may be within the parser

    def _start_with_other_head(self, head: Head, data: bytes) -> bool:
        """Start a complete request with a head of an earlier one, of any connection.

        The first head of a connection is always parsed, because that ends its time limits.
        """
        known = self.known_heads.get(head)
        if known is None or self._exchange is None or self._spare:
            return False
        self.url, self.headers = known.url, known.headers
        self.headers_by_name, self.holder = known.headers_by_name, known.holder
        body = head.body_of(data)
        if body is None or not self._start_with_known_head(body):
            return False
        self._known, self._unknown_heads = known, 0
        return True

    def _keep_head(self, head: Head) -> None:
        """Keep the head that was parsed last, of a request that was complete."""
        heads = self.known_heads
        if (known := heads.get(head)) is None:
            known = heads[head] = KnownHead(head, self)
            if len(heads) > MOST_HEADS:
                del heads[next(iter(heads))]
        self._known = known

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

    def encode_refusal(self, error: RequestError) -> bytes:
        path = self.url.partition(b"?")[0].decode("latin-1")
        return self.envelopes.get(path, encode_error)(error)[1]

    def answered(self) -> None:
        """Finish a fast response as uvicorn's `on_response_complete` does, but without a timer."""
        if self.pipeline:
            self.on_response_complete()
        elif not self.transport.is_closing():
            self.server_state.total_requests += 1
            if self.flow.read_paused:
                self.flow.resume_reading()
            self._idle_since_s = self.loop.time()
            if self._held:
                self.loop.call_soon(self._parse_held)

    def sweep(self, now_s: float) -> None:
        super().sweep(now_s)
        if self._idle_since_s and now_s - self._idle_since_s > self.timeout_keep_alive:
            self.timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._held = b""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.disconnected, exchange.is_writable = True, False
            if isinstance(cast(Any, self.cycle), FastResponse):
                # breaks a reference cycle, which the garbage collector would find late
                self.cycle = cast(Any, None)
            gone = exchange.on_gone
            exchange.on_gone = exchange.on_writable = None  # breaks a reference cycle, too
            if gone is not None:
                gone()
            if not exchange.response_complete:
                RECORDER.note_request(exchange.path, ClientClosed.status, exchange.origin)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._exchange is not None:
            self._exchange.is_writable = False

    def resume_writing(self) -> None:
        super().resume_writing()
        exchange = self._exchange
        if exchange is not None and not (exchange.response_complete or exchange.disconnected):
            exchange.is_writable = True
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
