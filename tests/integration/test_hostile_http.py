"""Clients that mean harm, or are broken, against a real instance."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.instance import Instance, echo
from tests.integration.test_hot_route import ONE, TEXT, Service, post, read
from tests.polling import poll

MIB = 1 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = echo("echo", step_s=0.002, slots=2, max_context=2_000_000)
    with Instance.up(tmp_path_factory.mktemp("hostile"), [model]) as instance:
        yield Service(instance)
        for said in ("Traceback", "unexpected_error", "ASGI", "Invalid HTTP", "WebSocket"):
            assert said not in instance.log


def to_the_end(connection: socket.socket) -> bytes:
    """All that comes until the server closes; a reset is an end, too."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            got += piece
    return got


def code_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def flood(connection: socket.socket, line: bytes) -> None:
    """Send the line until the server has had enough; fails if it takes 64 MiB of it."""
    block = line * (MIB // len(line))
    with contextlib.suppress(ConnectionError):
        for _ in range(64):
            connection.sendall(block)
        pytest.fail("it took 64 MiB of header")


@pytest.mark.parametrize("line", [b"y" * 1024, b"a: b\r\n"], ids=["one-line", "many"])
def test_an_endless_header_harms_nobody(service: Service, line: bytes) -> None:
    gateway = service.instance.gateway().pid
    assert gateway
    before_bytes = resident_bytes(gateway)
    with service.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx: ")
        flooding = threading.Thread(target=flood, args=(connection, line))
        flooding.start()
        while flooding.is_alive():
            start_s = time.monotonic()
            assert httpx.get(f"{service.url}/livez").status_code == 200
            assert time.monotonic() - start_s < 1.0
        flooding.join()
    assert resident_bytes(gateway) - before_bytes < 8 * MIB


def test_a_header_over_the_limit_is_told_so(service: Service) -> None:
    with service.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000)
        assert code_of(to_the_end(connection)) == (431, "header_too_large")


@pytest.mark.lane("waits")
def test_those_who_never_finish_are_sent_away(service: Service) -> None:
    """Hundreds at once; who asks properly meanwhile is answered."""
    begun = [b"", b"GET /liv", b"GET / HTTP/1.1\r\nhost: localhost\r\n"] * 100
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(service.connect()) for _ in begun]
        for connection, piece in zip(waiting, begun, strict=True):
            connection.sendall(piece)
        service.talk(post(ONE))
        for connection, piece in zip(waiting, begun, strict=True):
            got = to_the_end(connection)
            assert code_of(got) == (408, "request_timeout") if piece else got == b""


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00", b"hello\r\n\r\n"])
def test_what_is_no_http_is_told_so(service: Service, sent: bytes) -> None:
    with service.connect() as connection:
        connection.sendall(sent)
        assert code_of(to_the_end(connection)) == (400, "invalid_http")


def test_an_upgrade_to_a_websocket_is_answered_as_if_not_asked(service: Service) -> None:
    upgrade = (
        "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    )
    key = "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    assert b" 200 OK" in service.talk((upgrade + key).encode(), until=b'"ok"}')


@pytest.mark.parametrize("pad", [0, 60_000, 150_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_that_comes_with_an_upgrade_is_read(service: Service, path: str, pad: int) -> None:
    """As Java's client asks for h2c by default; with others before and behind it."""
    wish = ("connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAAA")
    body = {**ONE, "pad": "x" * pad}
    asks = post(body, *wish).replace(b"/v1/completions", path.encode(), 1)
    said = TEXT if path == "/v1/completions" else b'"count":5,'
    for pieces in ([asks], [asks[:30], asks[30:500], asks[500:]]):
        got = service.talk(*pieces, until=said)
        assert got.startswith(b"HTTP/1.1 200 OK")
    slow = post({**ONE, "prompt": "world"})
    got = service.talk(slow + asks + slow, until=b'"text":"world"', count=2)
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert said in got


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_client_that_leaves_between_pipelined_requests(service: Service, before: int) -> None:
    """By a reset, with some behind; its slot is free again and the log is quiet."""
    long = post({**ONE, "max_tokens": 1_000_000, "stream": True})
    with service.connect() as connection:
        connection.sendall(post(ONE) * before + long + post(ONE) * 3)
        read(connection, b"data: ")
        reset(connection)
    service.until("running", 0)
    with service.connect() as connection:
        connection.sendall((post(ONE) + b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n") * 20)
        reset(connection)
    service.until("running", 0)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/version", "/v1/models", "/", "/docs"])
def test_head_is_get_without_the_body(service: Service, path: str) -> None:
    with httpx.Client(base_url=service.url) as client:
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        kept = ("content-type", "content-length", "location")
        assert [head.headers.get(name) for name in kept] == [get.headers.get(n) for n in kept]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("HEAD", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(
    service: Service, method: str, path: str, allow: str
) -> None:
    answer = httpx.request(method, f"{service.url}{path}")
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)


def test_one_prompt_may_come_in_a_list(service: Service) -> None:
    service.talk(post({**ONE, "prompt": ["hello"]}))
    two = service.talk(post({**ONE, "prompt": ["hello", "world"]}), until=b"}}")
    assert len(json.loads(two.partition(b"\r\n\r\n")[2])["choices"]) == 2


# ---------------------------------------------------------------- memory, and readers that sleep


@pytest.mark.lane("long")
def test_what_waits_has_a_bound_in_bytes(tmp_path: Path) -> None:
    """Many large bodies for one slot: what does not fit is refused, and the rest is not doubled."""
    limit_bytes, body_bytes = 32 * MIB, 4 * MIB
    model = echo("echo", step_s=5.0, slots=1, max_context=100 * MIB)
    with Instance.up(tmp_path, [model], server={"max_queue_bytes": limit_bytes}) as instance:
        service = Service(instance)
        gateway = instance.gateway().pid
        assert gateway
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(service.connect())
            running.sendall(post(ONE))
            service.until("running", 1)
            before_bytes = resident_bytes(gateway)
            clients = [stack.enter_context(service.connect()) for _ in range(20)]
            for client in clients:
                client.sendall(post({**ONE, "prompt": "x" * body_bytes}))
            fits = limit_bytes // body_bytes - 1  # each holds a little more than its text
            service.until("waiting", fits)
            grown_bytes = resident_bytes(gateway) - before_bytes
            refused = 0
            for client in clients:
                client.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    head = client.recv(65536)
                    assert b" 429 " in head and b"retry-after: " in head
                    refused += 1
            assert refused == len(clients) - fits
            assert grown_bytes < limit_bytes + 7 * body_bytes  # the last one is being read


@pytest.mark.lane("long")
@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
def test_half_sent_bodies_have_a_bound_together(tmp_path: Path, path: bytes) -> None:
    """The gateway keeps no more of them, and others are served, with large bodies, too."""
    limit_bytes, body_bytes = 32 * MIB, 4 * MIB
    model = echo("echo", slots=4, max_context=100 * MIB)
    with Instance.up(tmp_path, [model], server={"max_queue_bytes": limit_bytes}) as instance:
        service = Service(instance)
        gateway = instance.gateway().pid
        assert gateway
        before_bytes = resident_bytes(gateway)
        half = post({**ONE, "prompt": "x" * body_bytes}).replace(b"/v1/completions", path, 1)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(service.connect()) for _ in range(24)]
            for client in clients:
                client.sendall(half[: -body_bytes // 8])
            service.talk(post(ONE))
            service.talk(post({**ONE, "prompt": "x" * body_bytes}), until=b'"finish_reason"')
            grown_bytes = resident_bytes(gateway) - before_bytes
            assert grown_bytes < limit_bytes + 10 * body_bytes  # the last one is answered
            refused = 0
            for client in clients:
                client.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    assert b" 503 " in (head := client.recv(65536)) and b"retry-after: " in head
                    refused += 1
            kept = limit_bytes // (body_bytes * 7 // 8)
            assert len(clients) - kept <= refused <= len(clients) - kept + 2


@pytest.mark.lane("waits")
def test_a_stream_that_nobody_reads_is_ended(tmp_path: Path) -> None:
    """It is cancelled in the engine, too; who reads slowly meanwhile gets all."""
    model = echo("echo", step_s=0.0005, slots=2, max_context=100 * MIB)
    endless = {**ONE, "max_tokens": 50_000_000, "stream": True}
    with Instance.up(tmp_path, [model], server={"write_timeout_s": 2, "ui": True}) as instance:
        service = Service(instance)
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(service.connect(receive_buffer_bytes=4096))
            reader.sendall(post({**endless, "max_tokens": 20_000}))
            sleepers = [stack.enter_context(service.connect(4096)) for _ in range(3)]
            sleepers[0].sendall(post({**endless, "prompt": "y" * 10_000}))
            sleepers[1].sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400)
            sleepers[2].sendall(b"GET /docs/api HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400)
            service.until("running", 2)
            got = read(reader, b"data: [DONE]")
            texts = re.findall(rb'"text":"([^"]*)"', got)  # tokens may share an event
            assert len(b"".join(texts)) == 20_000
            for sleeper in sleepers:
                poll("it is ended", lambda: gone(sleeper), within_s=60)  # noqa: B023
            service.until("running", 0)
            assert instance.log.count("client_not_reading") == 3


def gone(connection: socket.socket) -> bool:
    """Whether the server has reset a connection; nothing is read of it."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_only_sends_no_more_gets_its_answer(service: Service, version: str) -> None:
    for body in (ONE, {**ONE, "stream": True}, {**ONE, "prompt": "x" * 400}):
        with service.connect() as connection:
            connection.sendall(post(body, version=version))
            connection.shutdown(socket.SHUT_WR)
            got = to_the_end(connection)
        assert b"HTTP/1.1 200 OK" in got and b'"finish_reason":"length"' in got
        if version == "1.0":
            assert b"transfer-encoding" not in got and b"100 Continue" not in got


def test_a_client_that_has_left_is_cancelled(service: Service) -> None:
    """Also one that had sent all, and closes as politely as one that only sends no more."""
    slow = {**ONE, "max_tokens": 100_000}
    for body in (slow, {**slow, "stream": True}):
        for headers in ((), ("connection: close",)):
            with service.connect() as connection:
                connection.sendall(post(body, *headers))
                service.until("running", 1)
            service.until("running", 0)
