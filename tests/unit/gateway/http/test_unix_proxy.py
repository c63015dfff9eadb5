"""Requests that are passed on over a Unix socket, to a real server at its other end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from servekit.gateway.http.unix_proxy import UnixProxy
from tests.polling import poll_async


class Server:
    """Keeps what it was asked, and answers as the test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[bytes] = []
        self.pieces: list[bytes] = [b"hello"]
        self.holds = self.dies = False
        self.left = asyncio.Event()

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next((int(line[15:]) for line in head.lower().split(b"\r\n")
                     if line.startswith(b"content-length:")), 0)  # fmt: skip
        self.asked.append(head + await reader.readexactly(size))
        writer.write(b"HTTP/1.1 201 Made\r\nX-Own: 1\r\nconnection: close\r\n"
                     b"transfer-encoding: chunked\r\n\r\n")  # fmt: skip
        for piece in self.pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if self.holds:
            await reader.read()
            self.left.set()
        elif not self.dies:
            writer.write(b"0\r\n\r\n")
        writer.close()


class Client:
    """The ASGI side: sends its request, and leaves when told to."""

    def __init__(self, *pieces: bytes) -> None:
        more = [index < len(pieces) - 1 for index in range(len(pieces))]
        self.coming = [
            {"type": "http.request", "body": piece, "more_body": follows}
            for piece, follows in zip(pieces, more, strict=True)
        ]
        self.leaves = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self.coming:
            return self.coming.pop(0)
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent)


def scope(**fields: Any) -> Any:
    headers = [(b"host", b"x"), (b"x-mine", b"2"), (b"connection", b"close")]
    return {
        "type": "http", "method": "GET", "path": "/ui", "query_string": b"", "headers": headers,
        **fields,
    }  # fmt: skip


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "ui.sock")
    await server.start()
    yield server
    server.server.close()


async def show_waiting(send: Any) -> None:
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b"reload"})


async def ask(server: Server, client: Client, **fields: Any) -> Client:
    await UnixProxy(server.path, 8, show_waiting)(scope(**fields), client.receive, client.send)
    return client


async def test_a_response_comes_back_in_its_pieces(server: Server) -> None:
    server.pieces = [b"hello ", b"world"]
    client = await ask(server, Client(b""), query_string=b"a=1&b=%20", raw_path=b"/u%69")
    start, *rest = client.sent
    assert (start["status"], client.body) == (201, b"hello world")
    assert (b"x-own", b"1") in start["headers"]
    assert not {name for name, _ in start["headers"]} & {b"connection", b"transfer-encoding"}
    assert [one.get("more_body", False) for one in rest][-1] is False
    assert all(one["more_body"] for one in rest[:-1])
    head = server.asked[0].lower()
    assert head.startswith(b"get /u%69?a=1&b=%20 http/1.1\r\n")
    assert b"x-mine: 2" in head and b"connection: close" not in head


async def test_a_path_without_query_has_no_question_mark(server: Server) -> None:
    await ask(server, Client(b""))
    assert server.asked[0].startswith(b"GET /ui HTTP/1.1\r\n")


async def test_a_body_is_passed_on_whole(server: Server) -> None:
    headers = [(b"host", b"x"), (b"content-length", b"6")]
    await ask(server, Client(b"abc", b"", b"def"), method="POST", headers=headers)
    assert server.asked[0].endswith(b"\r\n\r\nabcdef")


@pytest.mark.parametrize("header", [(b"content-length", b"9"), (b"transfer-encoding", b"chunked")])
async def test_a_body_without_a_length_within_the_limit_is_not_read(
    server: Server, header: tuple[bytes, bytes]
) -> None:
    client = Client(*[b"abc"] * 3)
    await ask(server, client, method="POST", headers=[(b"host", b"x"), header])
    assert (client.sent[0]["status"], b"too long" in client.body) == (413, True)
    assert (server.asked, len(client.coming)) == ([], 3)


async def test_a_client_that_leaves_within_its_body_is_asked_nothing_more(server: Server) -> None:
    client = Client(b"abc")
    client.coming[0]["more_body"] = True
    client.leaves.set()
    headers = [(b"host", b"x"), (b"content-length", b"6")]
    await ask(server, client, method="POST", headers=headers)
    assert (server.asked, client.sent) == ([], [])


async def test_a_server_that_dies_within_its_answer_is_no_fault_of_ours(server: Server) -> None:
    server.dies = True
    client = await ask(server, Client(b""))
    assert [one["type"] for one in client.sent] == ["http.response.start", "http.response.body"]
    assert client.sent[-1]["more_body"], "the client sees that the answer is incomplete"


async def test_the_server_notices_a_client_that_leaves(server: Server) -> None:
    server.holds = True
    client = Client(b"")
    asking = asyncio.create_task(ask(server, client))
    await poll_async("the first piece has come", lambda: client.body)
    client.leaves.set()
    await asyncio.wait_for(asking, 10)
    await asyncio.wait_for(server.left.wait(), 10)


async def test_no_server_yet_is_503(tmp_path: Path) -> None:
    client = Client(b"")
    await UnixProxy(tmp_path / "not-there.sock", 8, show_waiting)(
        scope(), client.receive, client.send
    )
    assert client.sent[0]["status"] == 503
    assert (b"retry-after", b"2") in client.sent[0]["headers"]
    assert b"the UI is starting" in client.body


async def test_a_browser_gets_a_page_that_asks_again_while_there_is_no_server(
    tmp_path: Path,
) -> None:
    client, headers = Client(b""), [(b"host", b"x"), (b"accept", b"text/html,*/*")]
    proxy = UnixProxy(tmp_path / "not-there.sock", 8, show_waiting)
    await proxy(scope(headers=headers), client.receive, client.send)
    assert (client.sent[0]["status"], client.body) == (503, b"reload")


async def test_other_protocols_are_left_alone(server: Server) -> None:
    client = await ask(server, Client(b""), type="websocket")
    assert client.sent == [] and server.asked == []
