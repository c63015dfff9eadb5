"""Responses on the fast path and over ASGI: how they are written, joined, cut and given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import structlog

from servekit.errors import InvalidKey, RateLimited, RequestError, ServekitError
from servekit.gateway.http.asgi import EVENT_STREAM, encode_error, send_json
from servekit.gateway.http.request_context import ORIGIN
from servekit.gateway.http.response import (
    JOIN_BYTES,
    AsgiResponse,
    CoalescingTransport,
    DisconnectWatcher,
    FastResponse,
    asgi_endpoint,
)
from tests.polling import poll_async
from tests.unit.gateway.serving import served

LIMIT_BYTES = 100


# ---------------------------------------------------------------- writes that are joined


class Recording(asyncio.Transport):
    """A transport that keeps what is written, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.calls: list[str] = []
        self.closing = False
        self.half_closes = True

    def write(self, data: Any) -> None:
        assert not self.closing
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def can_write_eof(self) -> bool:
        return self.half_closes

    def write_eof(self) -> None:
        self.calls.append("eof")

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


def joining() -> tuple[CoalescingTransport, Recording]:
    raw = Recording()
    return CoalescingTransport(raw, asyncio.get_running_loop()), raw


async def test_what_is_written_in_one_turn_leaves_at_its_end_in_one_write() -> None:
    transport, raw = joining()
    transport.write(b"head")
    transport.write(b"body")
    assert raw.writes == []
    await asyncio.sleep(0)
    assert raw.writes == [b"headbody"]
    transport.write(b"more")
    await asyncio.sleep(0)
    assert raw.writes == [b"headbody", b"more"]


async def test_the_last_write_of_a_turn_leaves_at_once_behind_the_others() -> None:
    transport, raw = joining()
    transport.write_now(b"a")
    transport.write(b"b")
    transport.write_now(b"c")
    assert raw.writes == [b"a", b"bc"]
    await asyncio.sleep(0)
    assert raw.writes == [b"a", b"bc"]


async def test_much_is_not_held_until_the_turn_ends() -> None:
    transport, raw = joining()
    transport.write(b"x" * JOIN_BYTES)
    assert raw.writes == []
    transport.write(b"x")
    assert list(map(len, raw.writes)) == [JOIN_BYTES + 1]
    transport.write(b"y" * JOIN_BYTES)
    assert len(raw.writes) == 1, "it is counted anew"


async def test_nothing_is_written_to_what_is_closed() -> None:
    transport, raw = joining()
    transport.write(b"a")
    raw.closing = True
    transport.write_now(b"b")
    transport.write_now(b"c")
    transport.pause_reading()
    transport.resume_reading()
    transport.write_eof()
    await asyncio.sleep(0)
    assert (raw.writes, raw.calls, transport.is_closing()) == ([], [], True)


async def test_what_is_unsent_leaves_before_an_end() -> None:
    transport, raw = joining()
    transport.write(b"a")
    transport.write_eof()
    assert (raw.writes, raw.calls) == ([b"a"], ["eof"])
    transport.write(b"b")
    transport.close()
    assert raw.writes == [b"a", b"b"] and raw.closing


async def test_a_connection_that_cannot_be_half_closed_stays_open() -> None:
    transport, raw = joining()
    raw.half_closes = False
    transport.write_eof()
    assert (raw.calls, raw.closing) == ([], False)


async def test_reading_is_paused_on_the_transport_below() -> None:
    transport, raw = joining()
    transport.pause_reading()
    transport.resume_reading()
    assert raw.calls == ["pause", "resume"]
    assert transport.calls == raw.calls, "all else is the transport's own"


# ---------------------------------------------------------------- the fast path

Answer = tuple[bytes, dict[bytes, bytes], bytes]


async def ask(
    handler: Callable[[FastResponse], None], body: bytes = b"", *more: bytes, path: bytes = b"/hot"
) -> Answer:
    """Ask a hot route; return the status line, the headers, and all that follows until the end."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_json(send, b"{}")

    async with served(app, {path: handler}, LIMIT_BYTES) as port, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST %b HTTP/1.1\r\nhost: x\r\n" % path
        writer.write(b"%bcontent-length: %d\r\n\r\n" % (head, len(body) + sum(map(len, more))))
        for piece in (body, *more):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write_eof()  # so that the server closes after its answer
        answer = await reader.read()
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    pairs = (line.partition(b": ") for line in lines)
    return status, {name: value for name, _, value in pairs}, rest


async def test_json_is_sent_with_its_length_and_the_name_of_the_request() -> None:
    status, headers, body = await ask(
        lambda response: response.send_json(b'{"a":1}', 201, ((b"x-own", b"1"),))
    )
    assert status.startswith(b"HTTP/1.1 201 ")
    assert (headers[b"content-length"], headers[b"content-type"]) == (b"7", b"application/json")
    assert headers[b"x-own"] == b"1" and headers[b"x-request-id"]
    assert body == b'{"a":1}'


async def test_an_answer_is_sent_once() -> None:
    def twice(response: FastResponse) -> None:
        response.send_json(b"1")
        response.send_json(b"2")
        response.write(b"3")
        response.write(b"4", last=True)
        response.abort_stream()

    _, _, body = await ask(twice)
    assert body == b"1"


async def test_headers_of_one_response_are_not_those_of_the_next() -> None:
    def extra(response: FastResponse) -> None:
        response.extra = ((b"x-ratelimit", b"9"),)
        response.origin.warning = b"unknown parameter"
        response.send_json(b"{}")

    _, headers, _ = await ask(extra)
    assert headers[b"x-ratelimit"] == b"9"
    assert b"unknown parameter" in headers.values()
    _, headers, _ = await ask(lambda response: response.send_json(b"{}"))
    assert b"x-ratelimit" not in headers and b"unknown parameter" not in headers.values()


@pytest.mark.parametrize("pieces", [(b"abc",), (b"a", b"bc"), (b"a", b"b", b"c", b"d")])
async def test_a_body_comes_whole_however_it_is_cut(pieces: tuple[bytes, ...]) -> None:
    _, _, body = await ask(lambda response: response.send_json(bytes(response.body)), *pieces)
    assert body == b"".join(pieces)


async def test_a_body_over_the_limit_is_refused_and_the_limit_itself_is_taken() -> None:
    status, _, _ = await ask(lambda response: response.send_json(b"{}"), b"x" * LIMIT_BYTES)
    assert b" 200 " in status
    status, _, body = await ask(lambda response: response.send_json(b"{}"), b"x" * 60, b"x" * 41)
    assert b" 413 " in status and b"over the limit of 100 bytes" in body


@pytest.mark.parametrize(
    ("error", "code", "said", "header"),
    [
        (RequestError("n: too many", param="n"), b" 400 ", b"n: too many", None),
        (InvalidKey("no"), b" 401 ", b"no", b"www-authenticate"),
        (RateLimited("slow", retry_after_s=3.0), b" 429 ", b"slow", b"retry-after"),
        (ZeroDivisionError("secret"), b" 500 ", b"an internal error; see the logs", None),
    ],
)
async def test_an_exception_of_a_handler_is_its_response(
    error: Exception, code: bytes, said: bytes, header: bytes | None
) -> None:
    def fail(response: FastResponse) -> None:
        raise error

    with structlog.testing.capture_logs() as logs:
        status, headers, body = await ask(fail)
    assert code in status and said in body
    assert b"secret" not in body
    assert header is None or header in headers
    assert [one["path"] for one in logs] == (["/hot"] if code == b" 500 " else [])


async def test_a_handler_knows_the_request_that_it_answers_and_nobody_after_it() -> None:
    seen: list[bool] = []

    def look(response: FastResponse) -> None:
        seen.append(ORIGIN.get() is response.origin)
        response.send_json(b"{}")

    await ask(look)
    assert seen == [True] and ORIGIN.get() is None


@pytest.mark.parametrize("size", [1, 9, 10, 15, 16, 255, 1022, 1023, 1024, 1025, 70_000])
async def test_each_part_of_a_stream_is_a_chunk_of_its_size(size: int) -> None:
    def stream(response: FastResponse) -> None:
        response.begin_stream(EVENT_STREAM)
        response.write(b"x" * size)
        response.write(b"")
        response.write(b"y" * size, last=True)

    status, headers, body = await ask(stream)
    assert b" 200 " in status and headers[b"transfer-encoding"] == b"chunked"
    assert headers[b"content-type"] == EVENT_STREAM[0][1]
    chunks = b"".join(b"%x\r\n%b\r\n" % (size, letter * size) for letter in (b"x", b"y"))
    assert body == chunks + b"0\r\n\r\n"


async def test_a_stream_may_end_without_a_last_part() -> None:
    def stream(response: FastResponse) -> None:
        response.begin_stream(EVENT_STREAM)
        response.write(b"a")
        response.write(b"", last=True)

    _, _, body = await ask(stream)
    assert body == b"1\r\na\r\n0\r\n\r\n"


@pytest.mark.parametrize("error", [ServekitError("broken"), ZeroDivisionError()])
async def test_an_error_within_a_stream_cuts_it(error: Exception) -> None:
    def stream(response: FastResponse) -> None:
        response.begin_stream(EVENT_STREAM)
        response.write(b"a")
        raise error

    _, _, body = await ask(stream)
    assert body == b"1\r\na\r\n", "the client sees that it is incomplete"


async def test_a_complete_response_is_not_written_to_and_calls_nobody() -> None:
    kept: list[FastResponse] = []

    def answer(response: FastResponse) -> None:
        response.on_gone = response.on_writable = lambda: pytest.fail("it is over")
        assert response.is_writable and response.chunked_encoding
        kept.append(response)
        response.send_json(b"{}")

    await ask(answer)
    [response] = kept
    assert response.response_complete and not response.is_writable
    assert (response.on_gone, response.on_writable) == (None, None)
    response.message_event.set()  # uvicorn's protocol does, at a disconnect


# ---------------------------------------------------------------- over ASGI


class Client:
    """Reads a response over ASGI as fast as it is let, and may leave."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.unread = [{"type": "http.request", "body": body}]
        self.scope: Any = {"type": "http", "headers": [(b"x-a", b"1"), (b"x-a", b"2")]}
        self.gone, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.got: list[Any] = []

    async def receive(self) -> Any:
        if self.unread:
            return self.unread.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)
        await self.reads.wait()

    async def ask(self, handler: Any) -> Client:
        endpoint = asgi_endpoint(handler, LIMIT_BYTES, encode_error)
        async with asyncio.timeout(30):
            await endpoint(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.got[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(one["body"] for one in self.got[1:])

    @property
    def ended(self) -> bool:
        return bool(self.got) and not self.got[-1].get("more_body", True)


async def test_a_handler_answers_over_asgi_as_on_the_fast_path() -> None:
    def answer(response: Any) -> None:
        assert (response.headers, response.body) == ({b"x-a": b"2"}, b"abc")
        response.send_json(b'{"a":1}', 201, ((b"x-own", b"1"),))

    client = await Client(b"abc").ask(answer)
    assert (client.status, client.body, client.ended) == (201, b'{"a":1}', True)
    assert client.got[0]["headers"] == [
        (b"content-type", b"application/json"),
        (b"content-length", b"7"),
        (b"x-own", b"1"),
    ]


async def test_errors_over_asgi_have_their_status_and_headers() -> None:
    def fail(response: Any) -> None:
        raise RateLimited("slow", retry_after_s=3.0)

    client = await Client().ask(fail)
    assert (client.status, json.loads(client.body)["error"]["message"]) == (429, "slow")
    assert (b"retry-after", b"3") in client.got[0]["headers"]
    large = await Client(b"x" * (LIMIT_BYTES + 1)).ask(fail)
    assert large.status == 413


async def test_a_client_that_leaves_within_its_body_is_not_answered() -> None:
    client = Client()
    client.unread.clear()
    client.gone.set()
    await client.ask(lambda response: pytest.fail("there is no request"))
    assert client.got == []


async def test_a_stream_over_asgi_ends_with_its_last_part() -> None:
    kept: list[AsgiResponse] = []

    def stream(response: Any) -> None:
        kept.append(response)
        response.on_gone = response.on_writable = lambda: None
        response.begin_stream(EVENT_STREAM)
        response.write(b"a")
        response.write(b"")
        response.write(b"b", last=True)
        response.write(b"too late")

    client = await Client().ask(stream)
    assert (client.body, client.ended, len(client.got)) == (b"ab", True, 3)
    assert kept[0].on_gone is None and kept[0].on_writable is None, "nobody is called any more"
    assert client.got[0]["headers"] == [*EVENT_STREAM]


async def test_an_error_within_a_stream_over_asgi_cuts_it() -> None:
    def stream(response: Any) -> None:
        response.begin_stream(EVENT_STREAM)
        response.write(b"a")
        response.send_error(ServekitError("broken"))

    client = await Client().ask(stream)
    assert (client.body, client.ended) == (b"a", False)


async def test_while_a_client_does_not_read_the_response_is_not_writable() -> None:
    client, told = Client(), list[bool]()
    held: list[AsgiResponse] = []

    def stream(response: Any) -> None:
        held.append(response)
        response.begin_stream(EVENT_STREAM)
        response.on_writable = lambda: told.append(response.is_writable)

    client.reads.clear()
    asking = asyncio.create_task(client.ask(stream))
    await poll_async("the head", lambda: client.got)
    assert (held[0].is_writable, told) == (False, [])
    client.reads.set()
    await poll_async("it reads", lambda: told)
    assert told == [True] and held[0].is_writable
    held[0].write(b"a", last=True)
    await asking
    assert (client.body, client.ended) == (b"a", True)


async def test_a_client_that_leaves_is_told_to_the_handler_once() -> None:
    client, gone = Client(), list[bool]()
    held: list[AsgiResponse] = []

    def wait(response: Any) -> None:
        held.append(response)
        response.on_gone = lambda: gone.append(response.disconnected)

    asking = asyncio.create_task(client.ask(wait))
    await poll_async("the handler has it", lambda: held)
    client.gone.set()
    await asking
    assert gone == [True]
    held[0].send_json(b"too late")
    assert client.got == []


async def test_a_response_whose_sending_fails_is_given_up() -> None:
    gone: list[None] = []

    def wait(response: Any) -> None:
        response.on_gone = lambda: gone.append(None)
        response.begin_stream(EVENT_STREAM)

    client = Client()

    async def fail(message: Any) -> None:
        raise OSError("the connection is broken")

    client.send = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="broken"):
        await client.ask(wait)
    assert gone == [None]


# ---------------------------------------------------------------- who leaves


class Request:
    cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    client = Client()
    yield client
    client.gone.set()


async def test_a_request_is_cancelled_when_its_client_leaves(client: Client) -> None:
    request = Request()
    watcher = DisconnectWatcher(request, client.receive)
    client.gone.set()
    await poll_async("it is noticed", lambda: request.cancelled)
    watcher.stop_watching()
    assert (request.cancelled, client.unread) == (1, []), "what comes before is passed over"


async def test_a_short_request_is_not_watched(client: Client) -> None:
    request = Request()
    DisconnectWatcher(request, client.receive).stop_watching()
    client.gone.set()
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 0.02
    await poll_async("the time has passed", lambda: loop.time() > until_s)
    assert (request.cancelled, len(client.unread)) == (0, 1)


async def test_watching_may_be_stopped_while_it_goes_on(client: Client) -> None:
    request = Request()
    watcher = DisconnectWatcher(request, client.receive)
    await poll_async("it watches", lambda: not client.unread)
    watcher.stop_watching()
    client.gone.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert request.cancelled == 0
