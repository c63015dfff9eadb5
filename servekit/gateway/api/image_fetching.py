"""Images that a request names by their address, fetched where `server.fetch_images` allows it.

A client must not be able to make a gateway ask other servers than those (server-side request
forgery), so the host of each address, redirects included, has to be allowed, and so has each
address that its name stands for: the connection is made to the address that was checked.
Proxies of the environment are not used, as they look names up by themselves.

A gateway fetches few images at once, and a slow host holds each place until the time is over. So a
client gets no more places than it leaves free, and clients take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import httpcore
import httpx
from msgspec.structs import replace

from servekit import __version__
from servekit.errors import RequestError
from servekit.gateway.api.images import list_media, read_file
from servekit.gateway.routing.fair_queue import FairQueue
from servekit.protocol.access import ImageFetching
from servekit.protocol.messages import ChatMessage, Media

_REDIRECTS = 3
_PORTS = {"https": 443, "http": 80}
_FETCHES_AT_ONCE = 32
_MAX_ADDRESS_CHARS = 4096
_PIECES_AT_ONCE = 64
_SHOWN_CHARS = 200
_UNICAST = ipaddress.IPv6Network("2000::/3")
#: Addresses that `ipaddress` calls global: relays and translations, documentation, and the address
#: at which Azure's machines find their host.
_NOT_PUBLIC = tuple(
    map(ipaddress.ip_network, ("2002::/16", "3fff::/20", "192.88.99.0/24", "168.63.129.16/32"))
)
#: The middle of an address of IPv6 that ends in one of IPv4.
_ISATAP = (b"\x00\x00\x5e\xfe", b"\x02\x00\x5e\xfe")
_HEADERS: dict[bytes | str, bytes | str] = {
    "accept": "image/*",
    "accept-encoding": "identity",
    "connection": "close",
}

#: Names are looked up in threads of their own: a slow server of names holds up nothing else. A
#: lookup may outlive its fetch by as long as it took.
_resolver = ThreadPoolExecutor(2 * _FETCHES_AT_ONCE, "names-of-image-hosts")


class Refusal(Exception):
    """An image that is not fetched, or cannot be; its text ends a sentence."""


async def fetch_images(
    messages: list[ChatMessage], rules: ImageFetching, client: str = ""
) -> list[ChatMessage]:
    """Return the messages with the images that they name by address.

    `client` is who asks: a key, or an address. Raises RequestError, which names the address, if one
    is not allowed, does not answer in time, or is no image.
    """
    addresses = {image.address for image in list_media(messages)} - {""}
    room = _Room(rules.max_bytes)
    fetches = {one: asyncio.ensure_future(_fetch(one, rules, room, client)) for one in addresses}
    try:
        async with asyncio.timeout(rules.timeout_s):
            for address, fetch in fetches.items():
                try:
                    await fetch
                except Refusal as error:
                    raise _error(address, str(error)) from None
    except TimeoutError:
        raise _error(address, f"it took more than {rules.timeout_s:g} s") from None
    finally:
        for fetch in fetches.values():
            fetch.cancel()
        await asyncio.gather(*fetches.values(), return_exceptions=True)
    files = {
        address: read_file(fetch.result(), f"messages: the image at {_shown(address)}", "messages")
        for address, fetch in fetches.items()
    }

    def fetched(image: Media) -> Media:
        file = files.get(image.address)
        return image if file is None else replace(file, at=image.at, detail=image.detail)

    return [replace(one, media=tuple(map(fetched, one.media))) for one in messages]


def _error(address: str, reason: str) -> RequestError:
    said = f"messages: the image at {_shown(address)} cannot be fetched: {reason}"
    return RequestError(said, param="messages")


def _shown(address: str) -> str:
    """Return an address without its query, which may be a secret, and not too long."""
    return address.partition("?")[0][:_SHOWN_CHARS]


class _Room:
    """The bytes that the images of a request may still have."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._left_bytes = max_bytes

    def take(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise Refusal(
                f"the request's images are larger than {self._max_bytes} bytes;"
                " see server.fetch_images.max_bytes"
            )


class _Waiter:
    """A fetch that waits for a place, or has one."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.granted = asyncio.Event()


class Places:
    """Places for fetches, of which each client may hold as many as it leaves free.

    One client alone has half of them, a second one half of the rest, and so on. What is given back
    goes to clients that hold the fewest.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: Counter[str] = Counter()
        self._waiting: FairQueue[_Waiter] = FairQueue(sys.maxsize)

    @contextlib.asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it in this context."""
        waiter = _Waiter(client)
        self._waiting.push(waiter, client)
        self._grant()
        try:
            await waiter.granted.wait()
            yield
        finally:
            if not self._waiting.remove(waiter):
                self._change(client, -1)
                self._grant()

    def _grant(self) -> None:
        """Give free places to those that wait, one to each client in turn."""
        while granted := [one for one in self._waiting.heads() if self._take(one)]:
            for one in granted:
                self._waiting.remove(one, turn=True)
                one.granted.set()

    def _take(self, waiter: _Waiter) -> bool:
        if self._held[waiter.client] >= self._free:
            return False
        self._change(waiter.client, 1)
        return True

    def _change(self, client: str, count: int) -> None:
        self._free -= count
        self._held[client] += count
        if not self._held[client]:
            del self._held[client]


_places = Places(_FETCHES_AT_ONCE)


async def _fetch(address: str, rules: ImageFetching, room: _Room, client: str) -> bytes:
    async with _places.hold(client):
        url = parse_address(address)
        for _ in range(_REDIRECTS + 1):
            check_host(url, rules)
            answer = await _get(url, rules, room)
            if isinstance(answer, bytes):
                return answer
            url = parse_address(answer, url)
    raise Refusal(f"it leads to more than {_REDIRECTS} other addresses in turn")


def parse_address(address: str, base: httpx.URL | None = None) -> httpx.URL:
    """Return the URL of an address, which may be relative to `base`. Raises Refusal."""
    if len(address) > _MAX_ADDRESS_CHARS:
        raise Refusal(f"its address has more than {_MAX_ADDRESS_CHARS} characters")
    try:
        url = httpx.URL(address) if base is None else base.join(address)
    except (httpx.InvalidURL, ValueError):  # such as errors of `idna`
        raise Refusal("this is no address") from None
    if url.scheme not in _PORTS or not url.raw_host or url.userinfo:
        raise Refusal("its address has to begin with https:// or http://, and a host")
    return url


def check_host(url: httpx.URL, rules: ImageFetching) -> None:
    """Raise Refusal unless the host and the port of an address are allowed."""
    host = url.raw_host.decode().lower().rstrip(".")
    usual = url.port in (None, _PORTS[url.scheme])
    for rule in rules.hosts:
        name, port = _split(rule.lower())
        if not (usual if port is None else port == (url.port or _PORTS[url.scheme])):
            continue
        if name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:])):
            return
    raise Refusal(f"{url.netloc.decode()} is not among the hosts of server.fetch_images")


def _split(rule: str) -> tuple[str, int | None]:
    """Return the host and the port of a rule; an IPv6 address stands in brackets."""
    host, _, port = rule.rpartition(":")
    if host and port.isdigit() and (not rule.startswith("[") or host.endswith("]")):
        return host.strip("[]"), int(port)
    return rule.strip("[]"), None


async def _get(url: httpx.URL, rules: ImageFetching, room: _Room) -> bytes | str:
    """Return the body of an answer, or the address that it leads to."""
    backend = _CheckedBackend(rules.private_addresses)
    timeout = dict.fromkeys(("connect", "read", "write", "pool"), rules.timeout_s)
    headers = {**_HEADERS, "host": url.netloc.decode(), "user-agent": f"servekit/{__version__}"}
    pool = httpcore.AsyncConnectionPool(ssl_context=_tls(), network_backend=backend)
    target = httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )
    try:
        async with (
            pool,
            pool.stream("GET", target, headers=headers, extensions={"timeout": timeout}) as answer,
        ):
            told = {name.lower(): value for name, value in answer.headers}
            if answer.status in (301, 302, 303, 307, 308) and b"location" in told:
                return told[b"location"].decode("latin-1")
            if answer.status != 200:
                raise Refusal(f"its server answered {answer.status}")
            return await _read(answer, room)
    except httpcore.TimeoutException:
        raise Refusal(f"its server did not answer within {rules.timeout_s:g} s") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
        raise Refusal(f"its server cannot be reached: {error}") from None


async def _read(answer: httpcore.Response, room: _Room) -> bytes:
    found = bytearray()
    pieces = 0
    async for piece in answer.aiter_stream():
        room.take(len(piece))
        found += piece
        pieces += 1
        if pieces % _PIECES_AT_ONCE == 0:  # thousands of tiny ones may have come at once
            await asyncio.sleep(0)
    return bytes(found)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()


class _CheckedBackend(httpcore.AnyIOBackend):
    """Connects to public addresses only, unless private ones are allowed."""

    def __init__(self, private: bool) -> None:
        self._private = private

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                _resolver, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError):
            raise Refusal(f"the name {host} is not known") from None
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        if not self._private and not all(map(is_public, addresses)):
            raise Refusal(
                f"{host} has an address that is not public; see"
                " server.fetch_images.private_addresses"
            )
        if timeout is not None:
            timeout /= len(addresses)  # one that is silent leaves time for the others
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore.NetworkError, httpcore.ConnectTimeout):
                return await super().connect_tcp(address, port, timeout)
        return await super().connect_tcp(addresses[-1], port, timeout)


def is_public(address: str) -> bool:
    """Return whether an address is one of the internet, for one host, and of another machine.

    Of IPv6 only global unicast counts, without the forms that stand for an address of IPv4.
    """
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address) and known.ipv4_mapped is not None:
        known = known.ipv4_mapped
    if not known.is_global or known.is_multicast or _is_own(known):
        return False
    if isinstance(known, ipaddress.IPv6Address):
        if known not in _UNICAST or any(known in network for network in _NOT_PUBLIC):
            return False
        return known.packed[8:12] not in _ISATAP
    return not any(known in network for network in _NOT_PUBLIC)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether this machine has the address: only then can a socket be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as found:
            found.bind((str(address), 0))
    except OSError:
        return False
    return True
