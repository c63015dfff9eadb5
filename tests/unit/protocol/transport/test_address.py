from __future__ import annotations

from pathlib import Path

import pytest

from servekit.protocol.transport.address import host_and_port, is_tcp, tcp_address


@pytest.mark.parametrize("host", ["10.0.0.7", "node-3.cluster", "fe80::1", "0.0.0.0", "::"])
def test_an_address_says_host_and_port(host: str) -> None:
    assert is_tcp(tcp_address(host, 4711))
    assert host_and_port(tcp_address(host, 4711)) == (host, 4711)


@pytest.mark.parametrize("path", ["/run/x/0.sock", Path("/run/x/0.sock"), "tcp.sock", "tcp:/x"])
def test_all_else_is_a_path(path: str | Path) -> None:
    assert not is_tcp(path)


@pytest.mark.parametrize(
    "address", ["tcp://", "tcp://host", "tcp://:80", "tcp://h:port", "tcp://h:70000", "/run/x"]
)
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        host_and_port(address)
