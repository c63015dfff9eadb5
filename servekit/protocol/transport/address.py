"""Addresses of processes: the path of a Unix socket, or `tcp://HOST:PORT`."""

from __future__ import annotations

from pathlib import Path

_SCHEME = "tcp://"


def is_tcp(address: str | Path) -> bool:
    """Return whether an address is one of TCP, rather than a path."""
    return isinstance(address, str) and address.startswith(_SCHEME)


def tcp_address(host: str, port: int) -> str:
    """Return the address of a port; `host` is a name, or an IPv4 or IPv6 address."""
    return f"{_SCHEME}[{host}]:{port}" if ":" in host else f"{_SCHEME}{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address made by `tcp_address`. Raises ValueError with a sentence."""
    host, colon, port = address.removeprefix(_SCHEME).rpartition(":")
    if not is_tcp(address) or not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not of the form tcp://HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
