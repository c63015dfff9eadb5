"""The short way of the hot routes, byte by byte: raw sockets against a real instance."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.instance import Instance, echo
from tests.polling import poll

MAX_BODY_BYTES = 200_000
ONE = {"model": "echo", "prompt": "hello", "max_tokens": 5}
TEXT = b'"text":"hello"'
WITHIN_S = 20.0


class Service:
    """An instance with one echo worker of two slots."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.url = instance.until_settled().url
        self.port = int(self.url.rsplit(":", 1)[1])

    def connect(self, receive_buffer_bytes: int = 0) -> socket.socket:
        made = socket.socket()
        if receive_buffer_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        made.settimeout(WITHIN_S)
        made.connect(("127.0.0.1", self.port))
        return made

    def talk(self, *pieces: bytes, until: bytes = TEXT, count: int = 1) -> bytes:
        """Send the pieces, each in a segment of its own, and read until `until` has come."""
        with self.connect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                connection.sendall(piece)
            return read(connection, until, count)

    def state(self, what: str) -> int:
        found = httpx.get(f"{self.url}/readyz").json()["models"]["echo"][what]
        assert isinstance(found, int)
        return found

    def until(self, what: str, count: int) -> None:
        poll(f"{count} calls {what}", lambda: self.state(what) == count, WITHIN_S)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("hot")
    model = echo("echo", step_s=0.002, slots=2, max_context=2_000_000)
    with Instance.up(folder, [model], server={"max_body_bytes": MAX_BODY_BYTES}) as instance:
        yield Service(instance)
        assert "Traceback" not in instance.log
        assert "unexpected_error" not in instance.log
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0


def read(connection: socket.socket, until: bytes, count: int = 1) -> bytes:
    """All that comes until `until` has come so many times; fails at EOF or a timeout."""
    got = b""
    while got.count(until) < count:
        piece = connection.recv(65536)
        assert piece, f"closed after {got[-500:]!r}"
        got += piece
    return got


def post(
    body: dict[str, Any] | bytes,
    *headers: str,
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _head(method, version, f"content-length: {len(raw)}", *headers) + raw


def post_chunked(body: dict[str, Any], piece_bytes: int) -> bytes:
    raw = json.dumps(body).encode()
    pieces = [raw[at : at + piece_bytes] for at in range(0, len(raw), piece_bytes)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return _head("POST", "1.1", "transfer-encoding: chunked") + chunks + b"0\r\n\r\n"


def _head(method: str, version: str, *headers: str) -> bytes:
    lines = (f"{method} /v1/completions HTTP/{version}", "host: localhost", *headers)
    return "\r\n".join((*lines, "", "")).encode()


def text_of(stream: bytes) -> str:
    """The text of the events in raw, chunked bytes; no event is split over chunks here."""
    events = [line for line in stream.decode().split("\n") if line.startswith("data: {")]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)


def test_an_answer_has_one_status_line_its_length_and_the_date(service: Service) -> None:
    head, body = service.talk(post(ONE), until=b"}}").split(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"http/1.1 200 ok"
    assert b"content-length: %d" % len(body) in lines
    assert sum(line.startswith(b"date: ") for line in lines) == 1
    assert json.loads(body)["choices"][0]["text"] == "hello"


def test_a_body_in_chunks_or_in_many_segments_is_the_same_body(service: Service) -> None:
    service.talk(post_chunked(ONE, 7))
    whole = post(ONE)
    service.talk(*(whole[at : at + 10] for at in range(0, len(whole), 10)))
    long = {**ONE, "prompt": "x" * 150_000, "max_tokens": 3}
    service.talk(post(long), until=b'"text":"xxx"')


def test_pipelined_requests_are_all_answered_in_order(service: Service) -> None:
    prompts = ("one", "two", "three")
    got = service.talk(
        b"".join(post({**ONE, "prompt": prompt}) for prompt in prompts),
        until=b'"usage":{',
        count=3,
    )
    places = [got.index(b'"text":"%b' % prompt.encode()) for prompt in prompts]
    assert places == sorted(places)


def test_a_request_behind_a_stream_waits_for_its_end(service: Service) -> None:
    got = service.talk(post({**ONE, "stream": True}) + post(ONE), until=b'"usage":{')
    assert got.count(b"[DONE]") == 1
    assert b"\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n" in got


def test_what_http_makes_unusual_is_answered_too(service: Service) -> None:
    assert b"connection: close" in service.talk(post(ONE, "connection: close"))
    assert b"connection: close" in service.talk(post(ONE, version="1.0"))
    assert b"100 Continue\r\n\r\nHTTP/1.1 200" in service.talk(post(ONE, "expect: 100-continue"))
    assert b" 405 " in service.talk(post(ONE, method="PUT"), until=b"}}")


def test_errors_leave_the_connection_to_the_next_request(service: Service) -> None:
    bad = (post(b"{oops"), post({**ONE, "model": "x"}), post({**ONE, "suffix": "x"}), post(ONE))
    with service.connect() as connection:
        for request, status in zip(bad, (400, 404, 400, 200), strict=True):
            connection.sendall(request)
            got = read(connection, b"}}")
            assert got.startswith(b"HTTP/1.1 %d " % status)


def test_a_body_over_the_limit_is_refused_however_it_comes(service: Service) -> None:
    big = {**ONE, "prompt": "x" * (MAX_BODY_BYTES + 1)}
    got = service.talk(post(big) + post(ONE))
    assert got.startswith(b"HTTP/1.1 413 ")
    service.talk(post_chunked(big, 50_000), until=b"HTTP/1.1 413 ")


def test_a_deadline_of_the_body_ends_the_request(service: Service) -> None:
    late = {**ONE, "max_tokens": 1_000_000, "timeout_s": 0.2}
    assert service.talk(post(late), until=b"}}").startswith(b"HTTP/1.1 504 ")
    got = service.talk(post({**late, "stream": True}), until=b"0\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b'data: {"error":{"message":"not done within 0.2 s' in got
    service.until("running", 0)


# uvicorn stops reading behind a pipelined request, so only a failing write tells that it is gone
@pytest.mark.parametrize(("streamed", "behind"), [(True, b""), (False, b""), (True, post(ONE))])
def test_a_client_that_leaves_frees_its_slot(
    service: Service, streamed: bool, behind: bytes
) -> None:
    with service.connect() as connection:
        connection.sendall(post({**ONE, "max_tokens": 1_000_000, "stream": streamed}) + behind)
        service.until("running", 1)
    service.until("running", 0)


def test_a_stream_tells_its_place_in_the_queue_until_it_runs(service: Service) -> None:
    long = post({**ONE, "max_tokens": 1_000_000, "stream": True})
    options = {"stream_options": {"queue_position": True}, "stream": True}
    with service.connect() as first, service.connect() as second, service.connect() as third:
        for running in (first, second):
            running.sendall(long)
        service.until("running", 2)
        with service.connect() as before:
            before.sendall(post({**ONE, "max_tokens": 1_000_000}))
            service.until("waiting", 1)
            third.sendall(post({**ONE, **options}))
            assert read(third, b": queue position 1\n\n").startswith(b"HTTP/1.1 200 ")
        read(third, b": queue position 0\n\n")
        first.close()
        assert text_of(read(third, b"0\r\n\r\n")) == "hello"
    service.until("running", 0)


def test_a_client_that_does_not_read_stalls_itself_alone(service: Service) -> None:
    """It gets every byte once it reads; what waits behind its stream comes after."""
    tokens = 1000
    slow = {**ONE, "prompt": "ab" + "c" * 1000, "max_tokens": tokens, "stream": True}
    with service.connect(receive_buffer_bytes=4096) as connection:
        connection.sendall(post(slow) + post(ONE))
        service.until("running", 1)
        assert httpx.post(f"{service.url}/v1/completions", json=ONE).json()["choices"]
        service.until("running", 0)
        got = read(connection, b"[DONE]\n\n\r\n0\r\n\r\n")
        stream, _, rest = got.partition(b"[DONE]")
        assert len(text_of(stream)) == tokens
        assert TEXT in rest or read(connection, TEXT)
