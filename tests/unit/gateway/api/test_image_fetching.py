"""Fetching of images: which servers are asked, and what they may answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import RequestError
from servekit.gateway.api import image_fetching
from servekit.gateway.api.image_fetching import Places, fetch_images, is_public
from servekit.protocol.access import ImageFetching
from servekit.protocol.messages import ChatMessage, Media
from tests.integration import certificates
from tests.unit.gateway.api.test_images import make_file
from tests.unit.gateway.conftest import until

PICTURE = make_file("PNG")
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A server of made-up answers, which notes the requests that it gets."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head)
        with contextlib.suppress(ConnectionError):
            await self._write(head.split()[1], writer)
        writer.close()

    async def _write(self, path: str, writer: asyncio.StreamWriter) -> None:
        def send(status: str, body: bytes = b"", *lines: str) -> None:
            head = [f"HTTP/1.1 {status}", *lines, f"content-length: {len(body)}", "", ""]
            writer.write("\r\n".join(head).encode() + body)

        match path.partition("?")[0]:
            case "/picture":
                send("200 OK", PICTURE, "content-type: text/html")
            case "/moved":
                send("302 Found", b"", "location: /picture")
            case "/around":
                send("307 Temporary Redirect", b"", "location: /around")
            case "/away":
                send("302 Found", b"", f"location: http://127.0.0.1:{self.port + 1}/picture")
            case "/page":
                send("200 OK", b"<html>")
            case "/slow":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n")
                await writer.drain()
                await asyncio.Event().wait()
            case "/endless":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(bytes(65536))
                    await writer.drain()
            case "/crumbs":
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                writer.write(b"".join(b"1\r\n%c\r\n" % one for one in PICTURE * 100))
                writer.write(b"0\r\n\r\n")
            case "/odd":
                writer.write(b"SSH-2.0-OpenSSH\r\n")
            case _:
                send("404 Not Found")


@contextlib.asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    made = Server()
    answering: set[asyncio.Task[Any]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.ensure_future(made.answer(reader, writer)))

    listening = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=tls)
    made.port = listening.sockets[0].getsockname()[1]
    yield made
    for task in answering:
        task.cancel()
    await asyncio.gather(*answering, return_exceptions=True)
    listening.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as made:
        yield made


def rules(server: Server, **fields: Any) -> ImageFetching:
    """Rules that allow the server, by its port."""
    known: dict[str, Any] = {"hosts": (f"127.0.0.1:{server.port}",), "private_addresses": True}
    return ImageFetching(**known | fields)


async def fetch(address: str, allowed: ImageFetching) -> Media:
    message = ChatMessage("user", "See", media=(Media(b"", "", 3, "low", address),))
    [fetched] = await fetch_images([message], allowed)
    return fetched.media[0]


async def refusal(address: str, allowed: ImageFetching) -> str:
    with pytest.raises(RequestError) as caught:
        await fetch(address, allowed)
    assert caught.value.param == "messages"
    return str(caught.value)


async def test_it_is_fetched_and_stays_in_its_place(server: Server) -> None:
    for path in ("/picture", "/picture?token=1#there", "/moved"):
        image = await fetch(f"http://127.0.0.1:{server.port}{path}", rules(server))
        assert image == Media(PICTURE, "image/png", 3, "low")
    assert server.requests[0].startswith("GET /picture HTTP/1.1\r\n")
    assert "cookie" not in server.requests[0].lower()
    assert server.requests[1].startswith("GET /picture?token=1 HTTP/1.1\r\n")


async def test_an_image_that_is_named_twice_is_fetched_once(server: Server) -> None:
    named = Media(b"", "", address=f"http://127.0.0.1:{server.port}/picture")
    sent = Media(PICTURE, "image/png", 1)
    messages = [ChatMessage("user", "a", media=(named, sent)), ChatMessage("user", "b")]
    fetched = await fetch_images([*messages, messages[0]], rules(server))
    whole = ChatMessage("user", "a", media=(Media(PICTURE, "image/png"), sent))
    assert fetched == [whole, messages[1], whole]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/missing?secret", "/missing cannot be fetched: its server answered 404"),
        ("/page", "/page: this is no PNG, JPEG, WebP or GIF file"),
        ("/around", "cannot be fetched: it leads to more than 3 other addresses in turn"),
        ("/slow", "/slow cannot be fetched: it took more than 0.5 s"),
        ("/endless", "the request's images are larger than 100000 bytes; see server.fetch_images"),
        ("/odd", "cannot be fetched: its server cannot be reached: "),
        ("/away", "is not among the hosts of server.fetch_images"),
    ],
)
async def test_what_cannot_be_fetched_says_why(server: Server, path: str, said: str) -> None:
    allowed = rules(server, timeout_s=0.5, max_bytes=100_000)
    told = await refusal(f"http://127.0.0.1:{server.port}{path}", allowed)
    assert told.startswith(f"messages: the image at http://127.0.0.1:{server.port}{path[:4]}")
    assert said in told and "secret" not in told


async def test_crumbs_leave_the_loop_to_others(server: Server) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    others = asyncio.ensure_future(count_turns())
    image = await fetch(f"http://127.0.0.1:{server.port}/crumbs", rules(server))
    others.cancel()
    assert image.data == PICTURE * 100
    assert turns > len(image.data) / 64


async def test_the_images_of_a_request_share_the_room(server: Server) -> None:
    addresses = [f"http://127.0.0.1:{server.port}/picture?{n}" for n in range(3)]
    message = ChatMessage("user", "", media=tuple(Media(b"", "", address=a) for a in addresses))
    await fetch_images([message], rules(server, max_bytes=3 * len(PICTURE)))
    with pytest.raises(RequestError, match="larger than"):
        await fetch_images([message], rules(server, max_bytes=3 * len(PICTURE) - 1))


def slow_message(server: Server, count: int, name: str = "") -> ChatMessage:
    slow = [f"http://127.0.0.1:{server.port}/slow?{name}{number}" for number in range(count)]
    return ChatMessage("user", "", media=tuple(Media(b"", "", address=one) for one in slow))


async def test_one_client_cannot_take_the_places_of_others(server: Server) -> None:
    """While it waits for a slow host with all that it may have, others get theirs at once."""
    allowed = rules(server, timeout_s=60)
    greedy = [
        asyncio.ensure_future(fetch_images([slow_message(server, 10, f"{n}-")], allowed, "greedy"))
        for n in range(10)
    ]
    await until(lambda: len(server.requests) == 16)
    named = Media(b"", "", address=f"http://127.0.0.1:{server.port}/picture")
    message = ChatMessage("user", "", media=(named,))
    for number in range(20):
        async with asyncio.timeout(5):
            await fetch_images([message], allowed, f"other {number}")
    assert sum("/slow" in one for one in server.requests) == 16
    for one in greedy:
        one.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)
    async with asyncio.timeout(5):
        await fetch_images([message], allowed, "greedy")
    assert image_fetching._places._free == 32 and not image_fetching._places._held


async def test_places_go_round_as_they_are_given_back() -> None:
    places, order, held = Places(4), list[str](), list[asyncio.Task[None]]()

    async def take(client: str, done: asyncio.Event) -> None:
        async with places.hold(client):
            order.append(client)
            await done.wait()

    first = [asyncio.Event() for _ in range(2)]
    held += [asyncio.ensure_future(take("a", done)) for done in first]
    await until(lambda: len(order) == 2)
    waiting = {
        name: [asyncio.ensure_future(take(name, asyncio.Event())) for _ in range(5)]
        for name in ("a", "b", "c")
    }
    await until(lambda: len(order) == 4)
    assert order == ["a", "a", "b", "c"]
    gone = waiting["b"].pop()
    gone.cancel()
    first[0].set()
    await until(lambda: places._free == 1)  # which nobody who has a place already gets
    newcomer = asyncio.ensure_future(take("d", asyncio.Event()))
    await until(lambda: order[4:] == ["d"])
    first[1].set()
    await until(lambda: order[5:] == ["a"])
    held.append(newcomer)
    held += [one for many in waiting.values() for one in many]
    for one in held:
        one.cancel()
    await asyncio.gather(*held, gone, return_exceptions=True)
    assert places._free == 4 and not places._held and not len(places._waiting)


async def test_hosts_that_are_not_allowed_are_not_asked(server: Server) -> None:
    port = server.port
    for hosts in (("127.0.0.1",), (f"*.0.0.1:{port + 1}",), ("*",), (f"localhost:{port}",)):
        told = await refusal(f"http://127.0.0.1:{port}/picture", rules(server, hosts=hosts))
        assert f"127.0.0.1:{port} is not among the hosts of server.fetch_images" in told
    for address in (
        f"http://me:you@127.0.0.1:{port}/picture",
        f"ftp://127.0.0.1:{port}/",
        "http://",
    ):
        assert "its address has to begin with https:// or http://" in await refusal(
            address, rules(server)
        )
    assert not server.requests


@pytest.mark.parametrize(
    "address", ["https://xn--a/", "https://xn--/", "http://[h0/", "http://a\x00b/"]
)
async def test_what_is_no_address_is_refused(server: Server, address: str) -> None:
    told = await refusal(address, rules(server, hosts=("*",)))
    assert "this is no address" in told or "is not known" in told


@pytest.mark.parametrize(
    ("rule", "address", "allowed"),
    [
        ("example.com", "https://example.com/a", True),
        ("example.com", "http://EXAMPLE.com./a", True),
        ("example.com", "https://a.example.com/a", False),
        ("example.com", "https://example.com.evil.org/a", False),
        ("example.com", "https://example.com:8443/a", False),
        ("example.com:8443", "https://example.com:8443/a", True),
        ("example.com:8443", "https://example.com/a", False),
        ("example.com:443", "https://example.com/a", True),
        ("*.example.com", "https://a.b.example.com/a", True),
        ("*.example.com", "https://example.com/a", False),
        ("*.example.com", "https://evilexample.com/a", False),
        ("*", "https://anything.at.all/a", True),
        ("*", "https://anything.at.all:22/a", False),
        ("[2001:db8::1]", "https://[2001:db8::1]/a", True),
        ("[2001:db8::1]:8443", "https://[2001:db8::1]:8443/a", True),
        ("[2001:db8::1]", "https://[2001:db8::2]/a", False),
        ("xn--bcher-kva.example", "https://bücher.example/a", True),
    ],
)
def test_rules_of_hosts(rule: str, address: str, allowed: bool) -> None:
    url = image_fetching.parse_address(address)
    with contextlib.nullcontext() if allowed else pytest.raises(image_fetching.Refusal):
        image_fetching.check_host(url, ImageFetching((rule,)))


async def test_private_addresses_take_a_word_of_the_file(server: Server) -> None:
    allowed = rules(server, private_addresses=False)
    told = await refusal(f"http://127.0.0.1:{server.port}/picture", allowed)
    assert "127.0.0.1 has an address that is not public" in told
    assert not server.requests


async def test_a_name_is_looked_up_once_and_all_its_addresses_count(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def look_up(host: str, port: int, **more: Any) -> list[Any]:
        asked.append(host)
        addresses = ["203.0.113.9" if len(asked) > 1 else "93.184.216.34", "127.0.0.1"]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    allowed = rules(server, private_addresses=False, hosts=(f"rebinds.example:{server.port}",))
    told = await refusal(f"http://rebinds.example:{server.port}/picture", allowed)
    assert "rebinds.example has an address that is not public" in told
    assert asked == ["rebinds.example"] and not server.requests


async def test_a_certificate_has_to_be_trusted_and_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = certificates.make(tmp_path, addresses=("10.0.0.1",))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with serving(tls) as server:
        named, other = (f"https://{host}:{server.port}/picture" for host in ("localhost", "127.1"))
        allowed = rules(server, hosts=(f"localhost:{server.port}", f"127.1:{server.port}"))
        assert "certificate verify failed" in await refusal(named, allowed)
        trusting = ssl.create_default_context(cafile=str(certificate))
        monkeypatch.setattr(image_fetching, "_tls", lambda: trusting)
        assert (await fetch(named, allowed)).data == PICTURE
        assert "certificate verify failed" in await refusal(other, allowed)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("2002:7f00:1::", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b::5db8:d822", False),
        ("64:ff9b:1::a9fe:a9fe", False),
        ("::127.0.0.1", False),
        ("::ffff:0:7f00:1", False),
        ("fec0::1", False),
        ("2000::5efe:7f00:1", False),
        ("5f00::1", False),
        ("3fff::1", False),
        ("192.88.99.1", False),
        ("168.63.129.16", False),
    ],
)
def test_addresses_of_the_internet(address: str, public: bool) -> None:
    assert is_public(address) == public
