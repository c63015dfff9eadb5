from __future__ import annotations

import os
import socket
import time

import pytest

from servekit.errors import StartError
from servekit.system.sockets import bind_listener, holder_of, url_of


def test_port_zero_takes_a_free_one_and_accepts() -> None:
    with bind_listener("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()


def test_a_busy_port_is_refused_at_once_and_the_holder_named() -> None:
    with bind_listener("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(StartError) as caught:
            bind_listener("127.0.0.1", port)
        assert time.monotonic() - began < 10.0
    assert f"127.0.0.1:{port} is already in use by pid {os.getpid()} (" in str(caught.value)


def test_a_free_port_has_no_holder() -> None:
    with bind_listener("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    assert holder_of(port) == ""


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no such host.invalid", "cannot listen on host"),
        ("192.0.2.1", "192.0.2.1 is not an address of this machine"),
        ("x" * 300, "cannot listen on host"),
    ],
)
def test_a_host_that_cannot_be_bound_is_refused(host: str, words: str) -> None:
    with pytest.raises(StartError) as caught:
        bind_listener(host, 0)
    assert words in str(caught.value)


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")])
def test_urls_can_be_followed(host: str, shown: str) -> None:
    try:
        sock = bind_listener(host, 0)
    except StartError:
        pytest.skip(f"{host} is not available here")
    with sock:
        assert url_of(sock) == f"http://{shown}:{sock.getsockname()[1]}"
