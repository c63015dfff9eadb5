"""A framed connection between two servekit processes.

A frame is a 4-byte big-endian length and that many bytes of msgpack. Frames are parsed as they
arrive and delivered one by one, synchronously: there is no task and no queue per message. Messages
sent within one turn of the event loop usually leave in one write.

The connection is the lease: `on_close` is called exactly once, as soon as the peer is gone.

On one machine it is a Unix socket, between machines TCP under mutual TLS (`transport.tcp`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import msgspec

from servekit.errors import WireError
from servekit.protocol.transport.address import is_tcp

if TYPE_CHECKING:
    from servekit.protocol.transport.certificate_holder import CertificateHolder
    from servekit.protocol.transport.tls import Credentials, Member, Role

#: Maximum length of a frame. The longest legitimate one is a prompt at the body limit.
MAX_FRAME_BYTES = 64 * 2**20
#: Maximum length from a peer on another machine before its Hello.
FIRST_FRAME_BYTES = 64 * 2**10
#: A peer on another machine that has not answered for so long is lost, s.
LOST_S = 5.0
#: A peer with so much unsent data does not read; it is disconnected.
MAX_UNSENT_BYTES = 128 * 2**20
#: Longer messages are written at once, so that the size of the write buffer is known.
LARGE_BYTES = 64 * 2**10
#: Maximum messages per write. If all messages of a turn left in one write, the peer would idle
#: during the turn and this process during the peer's: under load they would work in lockstep.
TOGETHER = 8
#: Above so much unsent data, optional messages should not be sent; see `crowded`.
CROWDED_BYTES = 16 * 2**20
_READ_BYTES = 256 * 2**10
#: Time allowed for the last messages to reach the supervisor.
_CLOSE_S = 1.0

Incoming = TypeVar("Incoming")
_encode = msgspec.msgpack.Encoder().encode


class Connection(asyncio.Protocol, Generic[Incoming]):
    """An end of a connection; `incoming` is the union of messages that may arrive.

    `on_message` is called for every message, `on_close` once with the error that ended the
    connection, or None after a clean EOF or `close`. `crowded` is set while much data is unsent;
    `on_writable`, if set, is called once the peer has read most of it. `on_turn`, if set, is
    called at the end of a turn in which something was sent or `gather` was called.
    """

    def __init__(
        self,
        incoming: Any,
        on_message: Callable[[Incoming], None],
        on_close: Callable[[Exception | None], None],
    ) -> None:
        self._decoder = _decoder_of(incoming)
        self._on_message = on_message
        self._on_close = on_close
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._unsent: list[bytes] = []
        self._due = False  # `_end_turn` will be called
        self._error: Exception | None = None
        self._drained: asyncio.Future[None] | None = None  # set while `drained` waits
        self.crowded = False
        self.on_writable: Callable[[], None] | None = None
        self.on_turn: Callable[[], None] | None = None
        self.peer: Member | None = None  # by its certificate, if on another machine
        self._limit_bytes = MAX_FRAME_BYTES
        self.closed = self._loop.create_future()

    # ---- sending

    def send(self, message: msgspec.Struct) -> None:
        """Send a message with the others of this turn; silently dropped once closed.

        Raises WireError for a message that is too long, OverflowError or ValueError for values that
        msgpack cannot represent; the connection stays open.
        """
        if self._transport is None or self.closed.done():
            return
        body = _encode(message)
        if not self._due:
            self.gather()
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(body)} bytes is over the limit")
        self._unsent.append(len(body).to_bytes(4, "big"))
        self._unsent.append(body)
        if len(body) > LARGE_BYTES or len(self._unsent) >= 2 * TOGETHER:
            self._flush()

    def gather(self) -> None:
        """Have `on_turn` called at the end of this turn; its messages leave with the others.

        A separate callback for sending would cost another turn of the loop.
        """
        if not self._due:
            self._due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        try:
            if self.on_turn is not None:
                self.on_turn()
        finally:
            self._due = False
            self._flush()

    def _flush(self) -> None:
        transport = self._transport
        if transport is None or not self._unsent:
            return
        data, self._unsent = b"".join(self._unsent), []
        if transport.is_closing():
            return
        transport.write(data)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._fail(WireError("the peer does not read its messages"))

    async def drained(self) -> bool:
        """Send all buffered data and wait until the kernel has it; False if closed before that.

        A live peer will read the data that the kernel has, even if this process dies.
        """
        self._flush()
        transport = self._transport
        if transport is not None and transport.get_write_buffer_size():
            self._drained = self._drained or self._loop.create_future()
            transport.set_write_buffer_limits(high=0)  # have `resume_writing` called at the end
            await asyncio.wait({self._drained, self.closed}, return_when=asyncio.FIRST_COMPLETED)
        return transport is not None and not self.closed.done()

    def pause_writing(self) -> None:
        self.crowded = True

    def resume_writing(self) -> None:
        self.crowded = False
        if self._drained is not None and self._transport is not None:
            self._drained.set_result(None)
            self._drained = None
            self._transport.set_write_buffer_limits(high=CROWDED_BYTES)
        if self.on_writable is not None:
            self.on_writable()

    def close(self) -> None:
        """Send all buffered data and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once and drop unsent data."""
        if self._transport is not None:
            self._transport.abort()

    # ---- receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=CROWDED_BYTES)
        if transport.get_extra_info("ssl_object") is not None:
            self._exchange_hello(transport)

    def _exchange_hello(self, transport: asyncio.BaseTransport) -> None:
        from servekit.protocol.transport import tls

        self._limit_bytes = FIRST_FRAME_BYTES
        try:
            self.peer = tls.peer_member(transport)
        except WireError as error:
            self._fail(error)

    def allow(self, frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """Accept frames up to that length from a peer on another machine, now that it is known."""
        self._limit_bytes = frame_bytes

    def switch_protocol(
        self,
        incoming: Any,
        on_message: Callable[[Any], None],
        on_close: Callable[[Exception | None], None],
    ) -> None:
        """Change the message type and callbacks, from the next message on."""
        self._decoder = _decoder_of(incoming)
        self._on_message, self._on_close = on_message, on_close

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start, size = 0, len(received)
        view = memoryview(received)
        try:
            while size - start >= 4:
                length = int.from_bytes(view[start : start + 4], "big")
                if length > self._limit_bytes:
                    raise WireError(f"a frame of {length} bytes is over the limit")
                end = start + 4 + length
                if end > size:
                    break
                self._deliver(view[start + 4 : end])
                start = end
        except Exception as error:  # of the parser or the handler: the connection is unusable
            self._fail(error)
            start = size
        finally:
            view.release()
        del received[:start]

    def _receive_rest(self) -> None:
        """Deliver the data that the peer sent before it died.

        A write to a dead peer closes a transport at once and discards its unread data: the last
        answers of a worker. The descriptor is still open here.
        """
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        sock = None if self.peer is not None else sock  # the unread data is encrypted
        try:
            while sock is not None and (data := os.read(sock.fileno(), _READ_BYTES)):
                self.data_received(data)
        except OSError:
            return  # nothing is left

    def _deliver(self, frame: memoryview) -> None:
        try:
            message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a message of this protocol: {error}") from error
        finally:
            frame.release()
        if self._error is None:
            self._on_message(message)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, OSError) and self._error is None:
            self._receive_rest()
        self._unsent.clear()
        if not self.closed.done():
            self.closed.set_result(None)
            self._on_close(self._error or exc)


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def _decoder_of(incoming: Any) -> msgspec.msgpack.Decoder[Any]:
    if incoming not in _decoders:
        _decoders[incoming] = msgspec.msgpack.Decoder(incoming)
    return _decoders[incoming]


Factory = Callable[[], Connection[Any]]


async def dial_address(
    address: str | Path,
    factory: Factory,
    credentials: Credentials | CertificateHolder | None = None,
    *,
    lost_s: float = LOST_S,
    role: Role = "worker",
) -> Connection[Any]:
    """Connect to a Unix socket, or to a member at `tcp://HOST:PORT`, which takes credentials.

    Raises OSError when nothing listens there; between machines also, with a sentence, on a timeout
    (TimeoutError) or a lack of trust (`tls.NotTrusted`).
    """
    if is_tcp(address):
        from servekit.protocol.transport import tcp

        return await tcp.dial_member(str(address), factory, credentials, lost_s, role)
    _, connection = await asyncio.get_running_loop().create_unix_connection(factory, str(address))
    return connection


async def adopt_socket(sock: socket.socket, factory: Factory) -> Connection[Any]:
    """Use a connected socket, such as the one inherited from the supervisor."""
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(factory, sock=sock)
    return connection


class SocketChannel:
    """The channel of a process to a supervisor on its machine: a socket it was started with."""

    incoming: ClassVar[Any]  # the union of messages from a supervisor

    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._connection: Connection[Any] | None = None

    async def open(
        self, on_message: Callable[[Any], None], on_end: Callable[[Exception | None], None]
    ) -> None:
        self._connection = connection = Connection[Any](self.incoming, on_message, on_end)
        await adopt_socket(self._socket, lambda: connection)

    def send(self, message: msgspec.Struct) -> None:
        if self._connection is not None:
            self._connection.send(message)

    async def close(self) -> None:
        """Send everything queued, then close."""
        if self._connection is not None:
            self._connection.close()
            await asyncio.wait((self._connection.closed,), timeout=_CLOSE_S)


async def listen_at(
    address: str | Path,
    factory: Factory,
    credentials: Credentials | CertificateHolder | None = None,
    *,
    lost_s: float = LOST_S,
) -> asyncio.Server:
    """Listen on a Unix socket that only this user can open, or at `tcp://HOST:PORT`.

    Raises OSError; between machines also StartError for missing or invalid credentials.
    """
    if is_tcp(address):
        from servekit.protocol.transport import tcp

        return await tcp.listen_on_port(str(address), factory, credentials, lost_s)
    server = await asyncio.get_running_loop().create_unix_server(factory, str(address))
    os.chmod(address, 0o600)  # noqa: PTH101 - one quick call, and pathlib's own is no more async
    return server
