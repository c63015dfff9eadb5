"""Connections cut anywhere, and in any order: as if no head were ever known."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from servekit.gateway.http import protocol
from servekit.gateway.http.asgi import EVENT_STREAM, Receive, Scope, Send
from servekit.gateway.http.limits import LIMITS
from servekit.gateway.http.protocol import Http
from servekit.gateway.http.response import FastResponse

MOST_BYTES = 30
HOT = b"POST /hot HTTP/1.1\r\nHost: a\r\n"
HEADS = [
    HOT,
    b"POST /hot2 HTTP/1.1\r\nHost: a\r\n",
    b"POST /hot HTTP/1.1\r\nX: " + HOT,
    b"GET /x HTTP/1.1\r\nHost: a\r\n",
    b"POST /asgi HTTP/1.1\r\n",
    b"PUT /hot HTTP/1.1\r\n",
    b"POST /hot HTTP/1.1\r\nUpgrade: h2c\r\nConnection: upgrade\r\n",
    b"\r\n" + HOT,
    b"POST /hot HTTP/1.1\r\nExpect: 100-continue\r\n",
]
#: By their first letter they are answered at once, late, or as a stream.
BODIES = [b"", b"x", b"L1", b"S12", b"x" * 29, b"L" * 40, HOT, b"\r\n\r\n"]


class Wire(asyncio.Transport):
    """What a client would read, and whether it was hung up on."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.said += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.said += b"<EOF>"


class Forgetful(Http):
    """Knows no head: each request is parsed."""

    def _start_with_known_head(self, body: bytes) -> bool:
        return False


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


class Connection:
    """One client's, to a protocol of that kind."""

    def __init__(self, kind: type[Http]) -> None:
        config = uvicorn.Config(app, loop="none", lifespan="off", log_config=None, access_log=False)
        config.load()
        hot = {b"/hot": self._answer, b"/hot2": self._answer}
        self.taken: list[tuple[bytes, list[tuple[bytes, bytes]], bytes]] = []
        self.known = 0  # requests that were not parsed
        self.protocol = kind(
            config,
            ServerState(),
            {},
            hot=hot,
            max_body_bytes=MOST_BYTES,
            limits=LIMITS,
            connected=lambda: None,
        )
        self.wire = Wire()
        self.protocol.connection_made(self.wire)
        self._takes = self.protocol._start_with_known_head
        self.protocol._start_with_known_head = self._count  # type: ignore[method-assign]

    def _count(self, body: bytes) -> bool:
        taken = self._takes(body)
        self.known += taken
        return taken

    def _answer(self, exchange: FastResponse) -> None:
        loop = asyncio.get_running_loop()
        headers = [pair for pair in exchange.headers.items() if pair[0] != b"content-length"]
        self.taken.append((exchange.path, headers, bytes(exchange.body)))
        if exchange.body[:1] == b"L":
            loop.call_soon(exchange.send_json, b"late")
        elif exchange.body[:1] == b"S":
            exchange.begin_stream(EVENT_STREAM)
            exchange.write(b"begun")
            loop.call_soon(lambda: exchange.write(b"ended", last=True))
        else:
            exchange.send_json(b"now")

    async def play(self, pieces: list[tuple[bytes, bool]]) -> tuple[Any, ...]:
        """Send the pieces; after some of them what is due is done. All that can be told of it."""
        for piece, turns in pieces:
            if self.wire.closed:
                break
            self.protocol.data_received(piece)
            for _ in range(6 if turns else 0):
                await asyncio.sleep(0)
        for _ in range(12):
            await asyncio.sleep(0)
        idle = bool(self.protocol._idle_since_s or self.protocol.timeout_keep_alive_task)
        said = re.sub(rb"x-request-id: [^\r]*", b"", self.wire.said)
        self.protocol.connection_lost(None)
        return self.taken, said, self.wire.closed, idle


def request(chance: random.Random) -> bytes:
    head = chance.choice(HEADS[:2] if chance.random() < 0.6 else HEADS)
    body = chance.choice(BODIES)
    if chance.random() < 0.1:
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return b"%bTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (head, chunk)
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


def pieces(chance: random.Random) -> list[tuple[bytes, bool]]:
    """Some requests, whole, cut in two, or begun in the segment of the one before."""
    cut: list[bytes] = []
    for _ in range(chance.randint(2, 5)):
        one, how = request(chance), chance.random()
        if how < 0.55:
            cut.append(one)
        elif how < 0.75 or not cut:
            at = chance.randrange(1, len(one))
            cut += [one[:at], one[at:]]
        else:
            at = chance.randrange(len(one) + 1)
            cut[-1] += one[:at]
            cut.append(one[at:])
        if chance.random() < 0.15:
            cut.append(cut[-1])
    return [(piece, chance.random() < 0.8) for piece in cut if piece]


@pytest.mark.parametrize("seed", range(4))
async def test_it_is_as_if_each_request_were_parsed(seed: int) -> None:
    chance, known = random.Random(seed), 0
    for _ in range(400):
        played = pieces(chance)
        ours = Connection(Http)
        assert await ours.play(played) == await Connection(Forgetful).play(played), played
        known += ours.known
    assert known > 50, "or it shows nothing"


async def test_a_head_that_began_with_the_end_of_another_request_is_not_taken_for_a_whole_one() -> (
    None
):
    """Its end looks like a head: what follows with that very head would run as the one begun."""
    begun = b"POST /hot2 HTTP/1.1\r\nAuthorization: Bearer theirs\r\nX: "
    ask = b"POST /hot HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
    connection = Connection(Http)
    await connection.play([(ask + b"R1" + begun, True), (ask + b"R2", True), (ask + b"R3", True)])
    paths = [(path, body) for path, _, body in connection.taken]
    assert paths == [(b"/hot", b"R1"), (b"/hot2", b"R2"), (b"/hot", b"R3")]
    assert b"authorization" not in dict(connection.taken[-1][1])


def ask(number: int, path: bytes = b"/hot") -> tuple[bytes, bool]:
    body = b"R%d" % number
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nX: %d\r\n" % (path, number)
    return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body), True


async def test_heads_of_other_connections_are_known_after_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Http, "known_heads", {})
    one, other = Connection(Http), Connection(Http)
    await one.play([ask(1), ask(2, b"/hot2"), ask(1)])
    assert one.known == 1
    await other.play([ask(2, b"/hot2"), ask(1), ask(3), ask(2, b"/hot2")])
    assert other.known == 2, "all but the first of the connection and the new one"
    told = [(path, dict(headers)[b"x"], body) for path, headers, body in other.taken]
    assert told == [
        (b"/hot2", b"2", b"R2"),
        (b"/hot", b"1", b"R1"),
        (b"/hot", b"3", b"R3"),
        (b"/hot2", b"2", b"R2"),
    ]


async def test_few_heads_are_kept_and_a_connection_with_many_is_looked_up_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Http, "known_heads", {})
    monkeypatch.setattr(protocol, "MOST_HEADS", 4)
    await Connection(Http).play([ask(number) for number in range(6)])
    kept = [known.headers_by_name[b"x"] for known in Http.known_heads.values()]
    assert kept == [b"2", b"3", b"4", b"5"]
    many = Connection(Http)
    await many.play([ask(number) for number in range(10, 70)])
    kept = [known.headers_by_name[b"x"] for known in Http.known_heads.values()]
    looked_up = [*range(10, 10 + protocol.OTHER_HEADS), 9 + protocol.SELDOM]
    assert kept == [b"%d" % number for number in looked_up[-4:]]


async def test_a_head_that_changes_seldom_is_always_known_from_its_second_request_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Http, "known_heads", {})
    changes = 3 * protocol.OTHER_HEADS
    connection = Connection(Http)
    await connection.play([ask(number // 3) for number in range(3 * changes)])
    assert connection.known == 2 * changes


async def test_a_connection_is_idle_once_a_body_that_was_refused_has_come() -> None:
    connection = Connection(Http)
    head = b"%bContent-Length: 40\r\n\r\n" % HOT
    *_, idle = await connection.play([(head, True), (b"x" * 40, True)])
    assert idle and b" 413 " in connection.wire.said
