"""The pool of connections, before a socket of this test."""

from __future__ import annotations

import resource
import socket
import ssl
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.bench.client.client_protocol import Target
from servekit.bench.client.connection import Connection
from servekit.bench.client.connection_pool import Dialer, Unreachable, tls_context
from tests.polling import poll_async
from tests.unit.bench.serving import completion, serving, whole


def answer(body: dict[str, object]) -> list[bytes]:
    return [whole(completion())]


async def test_an_idle_connection_is_used_again_the_last_one_first() -> None:
    async with serving(answer) as server:
        pool = Dialer(server.target)
        assert pool.take_idle() is None
        one, other = await pool.open_connection(), await pool.open_connection()
        pool.put_idle(one)
        pool.put_idle(other)
        assert pool.take_idle() is other
        assert pool.take_idle() is one
        assert pool.take_idle() is None
        pool.close()


async def test_a_closed_connection_is_not_given_out() -> None:
    async with serving(answer) as server:
        pool = Dialer(server.target)
        early, late = await pool.open_connection(), await pool.open_connection()
        early.abort()
        pool.put_idle(early)
        assert pool._resting == []
        pool.put_idle(late)
        late.abort()
        assert pool.take_idle() is None


async def test_too_many_open_files_are_told_as_the_load_generators_own_fault() -> None:
    async with serving(answer) as server:
        pool = Dialer(server.target)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(Unreachable, match="the load generator, not the server"):
                await pool.open_connection()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_as_many_connections_as_are_missing_are_opened_ahead() -> None:
    async with serving(answer) as server:
        pool = Dialer(server.target)
        pool.put_idle(await pool.open_connection())
        await pool.open_ahead(3)
        idle = [pool.take_idle() for _ in range(4)]
        assert [isinstance(one, Connection) for one in idle] == [True, True, True, False]
        for one in idle[:3]:
            assert one is not None
            pool.put_idle(one)
        pool.close()
        await poll_async("all are accepted", lambda: server.connections == 3)
        assert all(one is not None and one.closed for one in idle[:3])


async def test_a_server_that_is_not_there_is_told_and_no_trouble_ahead() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        pool = Dialer(Target("127.0.0.1", sock.getsockname()[1], "/v1"))
        with pytest.raises(Unreachable, match="Connect"):
            await pool.open_connection()
        await pool.open_ahead(2)
        assert pool.take_idle() is None


async def test_a_server_that_does_not_accept_is_waited_for_only_so_long() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        held = []
        for _ in range(4):  # fills the queue of connections that nobody accepts
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(sock.getsockname())
            held.append(one)
        pool = Dialer(Target("127.0.0.1", sock.getsockname()[1], "/v1"))
        with pytest.raises(Unreachable, match=r"^it does not accept within 0\.05 s$"):
            await pool.open_connection(0.05)
        for one in held:
            one.close()


async def test_a_name_is_looked_up_once() -> None:
    async with serving(answer) as server:
        pool = Dialer(replace(server.target, host="localhost"))
        (await pool.open_connection()).abort()
        assert pool._host in ("127.0.0.1", "::1")


def test_certificates_are_checked_unless_told_otherwise(tmp_path: Path) -> None:
    target = Target("example.org", 443, "/v1", tls=True)
    assert tls_context(replace(target, tls=False)) is None
    strict = tls_context(target)
    assert strict is not None and strict.verify_mode is ssl.CERT_REQUIRED and strict.check_hostname
    loose = tls_context(replace(target, insecure=True))
    assert loose is not None and loose.verify_mode is ssl.CERT_NONE and not loose.check_hostname
    with pytest.raises(OSError, match="No such file"):
        tls_context(replace(target, ca=str(tmp_path / "none.pem")))
