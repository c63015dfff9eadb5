"""An answer over HTTP, from a real server that may be anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from servekit.cli.chat import stream as chat_stream
from servekit.cli.chat.stream import AnswerPart, ChatParameters, stream_answer
from servekit.errors import ServekitError, StartError


class Server:
    """Answers what it is told to, in pieces, and keeps what it was asked."""

    def __init__(self) -> None:
        self.status, self.pieces, self.endless = 200, [b""], False
        self.asked: Any = None
        self.hung_up = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                outer.asked = self.path, json.loads(self.rfile.read(length)), dict(self.headers)
                self.send_response(outer.status)
                self.end_headers()
                try:
                    for piece in outer.pieces:
                        self.wfile.write(piece)
                    while outer.endless:
                        self.wfile.write(outer.pieces[-1])
                except OSError:
                    outer.hung_up.set()

            def log_message(self, format: str, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.endless = False
    made.http.shutdown()
    made.http.server_close()


def pieces(server: Server, **parameters: object) -> list[AnswerPart]:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}) as client:
        return list(
            stream_answer(
                client, ChatParameters("m", parameters), [{"role": "user", "content": "hi"}]
            )
        )


def event(**delta: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def test_text_and_thoughts_come_as_pieces(server: Server) -> None:
    whole = b": queue position 1\n\n" + event(role="assistant") + event(reasoning_content="hm")
    whole += event(content="hé") + b'data: {"choices": []}\n\ndata: 7\n\ndata: [DONE]\n\n'
    server.pieces = [whole[i : i + 5] for i in range(0, len(whole), 5)]
    assert pieces(server, temperature=0.5) == [AnswerPart("hm", thought=True), AnswerPart("hé")]
    path, body, headers = server.asked
    assert path == "/v1/chat/completions" and headers["authorization"] == "Bearer k"
    assert body["temperature"] == 0.5 and body["stream"] is True and body["model"] == "m"


def test_what_goes_wrong_is_a_sentence(server: Server) -> None:
    server.status, server.pieces = 404, [b'{"error": {"message": "the model is not served"}}']
    with pytest.raises(ServekitError, match=r"refused \(404\): the model is not served"):
        pieces(server)
    server.pieces = [b"<html>" * 20_000]
    with pytest.raises(ServekitError, match=r"refused \(404\): without a reason"):
        pieces(server)
    server.status, server.pieces = 200, [event(content="a"), b'data: {"error": {"message": "x"}}\n']
    with pytest.raises(ServekitError, match=r"^x$"):
        pieces(server)
    server.pieces = [b"data: {oops\n\n"]
    with pytest.raises(ServekitError, match="not JSON"):
        pieces(server)


def test_an_event_without_an_end_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_stream, "_LONGEST_BYTES", 2**20)
    server.pieces, server.endless = [b"data: ", b"x" * 2**16], True
    with pytest.raises(ServekitError, match="an event of more than 1048576 bytes"):
        pieces(server)


def test_to_stop_listening_is_to_hang_up(server: Server) -> None:
    server.pieces, server.endless = [event(content="a" * 1000)], True
    with httpx.Client(base_url=server.url) as client:
        stream = stream_answer(client, ChatParameters("m"), [])
        assert next(stream).text == "a" * 1000
        stream.close()  # type: ignore[attr-defined]  # a generator
        assert server.hung_up.wait(5)


def test_nobody_there() -> None:
    with httpx.Client(base_url="http://127.0.0.1:1/v1") as client, pytest.raises(StartError):
        list(stream_answer(client, ChatParameters("m"), []))
