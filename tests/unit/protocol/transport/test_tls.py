"""Who may talk to whom between machines, and the sentence where not. Real sockets, real TLS."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import uvloop
from msgspec.structs import replace

from servekit.errors import StartError, WireError
from servekit.protocol.messages import Cancel, Generate, SamplingParams
from servekit.protocol.transport import tcp as module
from servekit.protocol.transport.address import tcp_address
from servekit.protocol.transport.certificate_authority import SKEW_S
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.connection import (
    FIRST_FRAME_BYTES,
    Connection,
    dial_address,
    listen_at,
)
from servekit.protocol.transport.credentials import Role, read_credentials
from servekit.protocol.transport.tls import (
    Authority,
    Credentials,
    Member,
    NotTrusted,
    explain_failure,
    load_certificate,
    new_context,
    peer_member,
)
from tests.unit.protocol.transport.test_connection import DEADLINE_S, End

OURS = Authority.new("c")
OTHERS = Authority.new("c")
WORKER = OURS.issue("worker", "m/0")
GATEWAY = OURS.issue("gateway", "gateway/0")
DAY_S = 86400.0
both_loops = pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class Listener:
    """A worker's port, and the ends of all who have come to it."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[End] = asyncio.Queue()
        self.address = ""

    def connect(self) -> Connection[Any]:
        end = End()
        self.ends.put_nowait(end)
        return end.connection

    def met(self) -> list[End]:
        """Those who have come through the handshake."""
        ends = [self.ends.get_nowait() for _ in range(self.ends.qsize())]
        return [end for end in ends if end.connection.peer is not None]

    async def next(self) -> End:
        return await asyncio.wait_for(self.ends.get(), DEADLINE_S)


@asynccontextmanager
async def listening(
    credentials: Credentials | CertificateHolder = WORKER, **how: Any
) -> AsyncIterator[Listener]:
    listener = Listener()
    server = await listen_at("tcp://127.0.0.1:0", listener.connect, credentials, **how)
    listener.address = tcp_address("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield listener
    finally:
        server.close()
        while not listener.ends.empty():
            listener.ends.get_nowait().connection.abort()


def issued_at(unix_s: float, monkeypatch: pytest.MonkeyPatch, role: Role) -> Credentials:
    """Credentials of our authority as a machine issues them whose clock says that."""
    with monkeypatch.context() as clock:
        clock.setattr("servekit.protocol.transport.certificate_authority.time.time", lambda: unix_s)
        return OURS.issue(role, "m/0", life_s=DAY_S)


def taken_for_valid(credentials: Credentials) -> Credentials:
    """As they are to a machine whose clock agrees with who has issued them."""
    return replace(credentials, not_before=0.0, not_after=time.time() + DAY_S)


@both_loops
def test_messages_pass_and_each_knows_the_other(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def meeting() -> None:
        async with listening() as listener:
            client = End()
            connection = await dial_address(listener.address, lambda: client.connection, GATEWAY)
            long = Generate(1, SamplingParams(), prompt="x" * 3_000_000)
            connection.send(Cancel(1))
            server = await listener.next()
            assert await server.next() == Cancel(1)
            assert connection.peer == Member(OURS.cluster, "worker", "m/0")
            assert server.connection.peer == Member(OURS.cluster, "gateway", "gateway/0")
            server.connection.allow()
            connection.send(long)
            assert await server.next() == long
            connection.close()
            assert await server.closed() is None

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(meeting())


async def test_only_small_frames_before_it_is_known_who_comes() -> None:
    async with listening() as listener:
        client = End()
        connection = await dial_address(listener.address, lambda: client.connection, GATEWAY)
        connection.send(Generate(1, SamplingParams(), prompt="x" * FIRST_FRAME_BYTES))
        server = await listener.next()
        assert "over the limit" in str(await server.closed())
        assert server.messages.empty()
        await client.closed()


async def test_who_is_of_another_cluster_is_refused_by_name_on_both_sides() -> None:
    async with listening() as listener:
        with pytest.raises(NotTrusted, match="of another cluster"):
            await dial_address(
                listener.address, lambda: End().connection, OTHERS.issue("gateway", "g")
            )
        # one that trusts us, and is not of us: TLS 1.3 has its handshake done by then
        posing = replace(OTHERS.issue("gateway", "g"), authority=OURS.certificate)
        client = End()
        with structlog.testing.capture_logs() as logs:
            await dial_address(listener.address, lambda: client.connection, posing)
            client.connection.send(Cancel(1))
            await client.closed()
        assert listener.met() == []
        [said] = [entry["reason"] for entry in logs if "refused" in entry["event"]]
        assert "another cluster" in said


@pytest.mark.parametrize("role", ["gateway", "supervisor"])
async def test_only_a_worker_is_a_server(role: Role) -> None:
    async with listening(OURS.issue(role, "posing")) as listener:
        with pytest.raises(NotTrusted, match="may not be at that end"):
            await dial_address(listener.address, lambda: End().connection, GATEWAY)


async def test_a_gateway_is_a_server_where_its_certificate_says_so_and_never_a_worker() -> None:
    supervisor = OURS.issue("supervisor", "supervisor")
    async with listening(OURS.issue("gateway", "gateway/1", is_dialled=True)) as listener:
        connection = await dial_address(
            listener.address, lambda: End().connection, supervisor, role="gateway"
        )
        assert connection.peer == Member(OURS.cluster, "gateway", "gateway/1")
        connection.close()
        with pytest.raises(NotTrusted, match="is not a worker of this cluster"):
            await dial_address(listener.address, lambda: End().connection, supervisor)


async def test_without_a_certificate_nobody_comes_in() -> None:
    async with listening() as listener:
        open_context = ssl.create_default_context()
        open_context.check_hostname, open_context.verify_mode = False, ssl.CERT_NONE
        port = int(listener.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=open_context)
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            writer.write(b"\0\0\0\1\xc0")
            await asyncio.wait_for(reader.readexactly(1), DEADLINE_S)
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
        assert not answer.startswith(b"HTTP")
        writer.close()
        assert listener.met() == []
        with pytest.raises(NotTrusted, match="no certificate"):
            await dial_address(listener.address, lambda: End().connection)


def test_a_server_asks_for_a_certificate_in_the_handshake() -> None:
    assert refusal(WORKER, new_client(None)) == "the other side has shown no certificate"


def test_tls_1_2_is_refused() -> None:
    client = new_client(GATEWAY)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert refusal(WORKER, client) == "the other side does not speak TLS 1.3"


def new_client(credentials: Credentials | None) -> ssl.SSLContext:
    """A client that takes any server, and shows these."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    if credentials is not None:
        load_certificate(client, credentials)
    return client


def refusal(credentials: Credentials, client: ssl.SSLContext) -> str:
    """Why the server of a handshake in memory refuses the client; "" where it does not."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = new_context(credentials, "server").wrap_bio(up, down, server_side=True)
    asks = client.wrap_bio(down, up)
    for _ in range(10):
        for end in (asks, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                if end is server:
                    return explain_failure(error)
    return ""


def test_a_certificate_that_is_not_shown_is_nobody() -> None:
    """OpenSSL tells of a peer without one as of one whose certificate is empty."""
    with pytest.raises(NotTrusted, match="names no member"):
        peer_member(SimpleNamespace(get_extra_info={"peercert": {}}.get))
    assert peer_member(SimpleNamespace(get_extra_info={"peercert": None}.get)) is None


async def test_a_server_that_shows_nothing_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servekit.protocol.transport.tls.peer_member", lambda transport: None)
    async with listening() as listener:
        with pytest.raises(NotTrusted, match="is not a worker of this cluster"):
            await dial_address(listener.address, lambda: End().connection, GATEWAY)


async def test_a_port_of_something_else_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = tcp_address("127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(NotTrusted, match="does not speak TLS"):
        await dial_address(address, lambda: End().connection, GATEWAY)
    server.close()


async def test_who_accepts_and_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DIAL_S", 0.2)
    kept: list[Any] = []  # a writer that nobody holds is closed
    server = await asyncio.start_server(lambda *ends: kept.append(ends), "127.0.0.1", 0)
    address = tcp_address("127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(TimeoutError, match="has not answered within"):
        await dial_address(address, lambda: End().connection, GATEWAY)
    server.close()


@pytest.mark.parametrize(
    ("offset_s", "said"),
    [
        (SKEW_S + DAY_S, "not valid yet by the clock here"),
        (-2 * DAY_S, "has expired by the clock here"),
    ],
)
async def test_clocks_that_disagree_are_named(
    offset_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = issued_at(time.time() + offset_s, monkeypatch, "worker")
    async with listening(taken_for_valid(worker)) as listener:
        with pytest.raises(NotTrusted, match=said):
            await dial_address(listener.address, lambda: End().connection, GATEWAY)


async def test_clocks_that_nearly_agree_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = issued_at(time.time() + SKEW_S / 2, monkeypatch, "worker")
    async with listening(ahead) as listener:
        connection = await dial_address(listener.address, lambda: End().connection, GATEWAY)
        connection.abort()


@pytest.mark.parametrize(
    ("offset_s", "said"), [(SKEW_S + 500, "(800|799) s behind"), (-2 * DAY_S, "has expired 864")]
)
async def test_a_clock_that_is_wrong_here_is_named_at_once(
    offset_s: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = issued_at(time.time() + offset_s, monkeypatch, "gateway")
    with pytest.raises(NotTrusted, match=said):
        await dial_address("tcp://127.0.0.1:1", lambda: End().connection, own)
    with pytest.raises(StartError, match=said):
        await listen_at("tcp://127.0.0.1:0", lambda: End().connection, own)


async def test_a_renewed_certificate_counts_for_new_connections_and_old_ones_live_on() -> None:
    worker = CertificateHolder(OURS.issue("worker", "m/0", life_s=3.0))
    async with listening(worker) as listener:
        client = End()
        first = await dial_address(listener.address, lambda: client.connection, GATEWAY)
        server = await listener.next()
        while time.time() <= worker.credentials.not_after:  # noqa: ASYNC110 - time has to pass
            await asyncio.sleep(0.01)
        with pytest.raises(NotTrusted, match="has expired by the clock here"):
            await dial_address(listener.address, lambda: End().connection, GATEWAY)
        worker.renew(OURS.issue("worker", "m/0"))
        second = await dial_address(listener.address, lambda: End().connection, GATEWAY)
        first.send(Cancel(1))
        assert await server.next() == Cancel(1)
        second.abort()
        first.abort()


def test_nobody_is_renewed_as_somebody_else() -> None:
    worker = CertificateHolder(WORKER)
    for other in (OURS.issue("worker", "m/1"), GATEWAY, OTHERS.issue("worker", "m/0")):
        with pytest.raises(WireError, match="cannot be renewed"):
            worker.renew(other)
    assert worker.credentials is WORKER


def test_an_authority_may_be_handed_on() -> None:
    again = Authority.from_bytes(OURS.to_bytes())
    assert again == OURS
    issued = again.issue("gateway", "g")
    assert Credentials.from_bytes(issued.to_bytes()) == issued
    for kind in (Authority, Credentials):
        with pytest.raises(StartError, match="servekit"):
            kind.from_bytes(b"\x93abc")


def test_keys_are_not_told() -> None:
    assert b"PRIVATE" in WORKER.key
    for shown in (repr(WORKER), repr(OURS), str([WORKER]), f"{OURS}"):
        assert "PRIVATE" not in shown


def test_credentials_are_handed_over_once() -> None:
    handed = WORKER.hand_over()
    another = os.dup(handed)  # what a process has that inherited it by mistake
    assert read_credentials(handed) == WORKER
    assert os.pread(another, 100, 0) == b""
    os.close(another)
    with pytest.raises(OSError):
        os.fstat(handed)


def test_credentials_come_through_a_pipe_too(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, WORKER.to_bytes())
    os.close(writing)
    assert read_credentials(reading) == WORKER


def test_a_member_may_have_any_name() -> None:
    for name in ("smollm2/0", "m" * 200, "ünïcode & co", "a/b/c?d#e"):
        assert OURS.issue("worker", name).member == name
