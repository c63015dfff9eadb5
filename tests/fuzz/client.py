"""A client that says what it is told to, valid or not, and reads answers strictly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

#: Longest answer that is read at all.
MAX_ANSWER_BYTES = 256 * 2**20
_BODILESS = (204, 304)


class Malformed(Exception):
    """What came is no HTTP answer."""


class Ended(Exception):
    """The server closed. `begun`: in the middle of an answer."""

    def __init__(self, *, begun: bool) -> None:
        super().__init__("closed in the middle of an answer" if begun else "closed, unanswered")
        self.begun = begun


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"

    @property
    def kind(self) -> str:
        """Its content type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int) -> Client:
        return cls(*await asyncio.open_connection(host, port, limit=2**20))

    def send(self, data: bytes) -> None:
        """Without waiting: what is refused early is answered while it is still being sent."""
        self._writer.write(data)

    async def turn(self) -> None:
        """Have what was sent leave in a segment of its own."""
        await asyncio.sleep(0)

    def end(self) -> None:
        """Say that nothing more will come; the server may still answer."""
        with contextlib.suppress(OSError):  # it has been refused, and cut off, before it ended
            if self._writer.can_write_eof() and not self._writer.is_closing():
                self._writer.write_eof()

    def close(self, *, reset: bool = False) -> None:
        sock: socket.socket | None = self._writer.get_extra_info("socket")
        if reset and sock is not None and not self._writer.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        self._writer.close()

    # ---- reading

    async def some(self, size: int) -> bytes:
        """At most so many bytes, once any come."""
        return await self._reader.read(size)

    async def answer(self, method: str) -> Answer:
        """The next answer, whole. Raises Ended and Malformed."""
        begun = False
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            begun = True
            answer = _parse_head(head)
            if answer.status == 100:
                return await self.answer(method)
            if method != "HEAD" and answer.status not in _BODILESS:
                answer.body = await self._body(answer)
            return answer
        except asyncio.IncompleteReadError as error:
            raise Ended(begun=begun or bool(error.partial)) from None
        except ConnectionError:
            raise Ended(begun=begun) from None
        except asyncio.LimitOverrunError as error:
            raise Malformed(f"a line over the limit: {error}") from None

    async def _body(self, answer: Answer) -> bytes:
        if answer.headers.get("transfer-encoding") == "chunked":
            return await self._chunks()
        length = answer.headers.get("content-length")
        if length is None:
            return await self._reader.read(MAX_ANSWER_BYTES) if answer.closes else b""
        if not length.isdigit():
            raise Malformed(f"content-length: {length!r}")
        return await self._reader.readexactly(int(length))

    async def _chunks(self) -> bytes:
        got: list[bytes] = []
        while True:
            line = await self._reader.readuntil(b"\r\n")
            try:
                size = int(line, 16)
            except ValueError:
                raise Malformed(f"a chunk's size: {line[:40]!r}") from None
            piece = await self._reader.readexactly(size + 2)
            if piece[-2:] != b"\r\n":
                raise Malformed(f"a chunk's end: {piece[-10:]!r}")
            if not size:
                return b"".join(got)
            got.append(piece[:-2])


def _parse_head(head: bytes) -> Answer:
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or parts[0] != "HTTP/1.1" or not parts[1].isdigit():
        raise Malformed(f"a status line: {first[:80]!r}")
    answer = Answer(int(parts[1]))
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise Malformed(f"a header: {line[:80]!r}")
        name = name.lower()
        if name in answer.headers and name in ("content-length", "content-type", "connection"):
            raise Malformed(f"{name} twice")
        answer.headers[name] = value.strip()
    return answer
