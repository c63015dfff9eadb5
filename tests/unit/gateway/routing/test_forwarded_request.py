"""A forwarded response: its parts, the window that the client opens, and what may begin anew."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.errors import WorkerLost
from servekit.gateway.routing.forwarded_request import ForwardedRequest
from servekit.protocol.forwarding import PIECE_BYTES
from servekit.protocol.messages import Delta, HttpPart, HttpRequest

HTTP = HttpRequest("/v1/rerank", size_bytes=3)


def ask(body: bytes = b"abc") -> ForwardedRequest:
    return ForwardedRequest("m", HTTP, body, "key")


def part(data: bytes, **fields: Any) -> Delta:
    return Delta(1, "", [], http=HttpPart(data), **fields)


class Meter:
    """What is counted."""

    def __init__(self) -> None:
        self.firsts: list[ForwardedRequest] = []
        self.times_ns: list[Any] = []

    def on_first_token(self, call: ForwardedRequest) -> None:
        self.firsts.append(call)

    def on_ended(self, call: ForwardedRequest, outcome: str, last: Delta | None) -> None:
        assert last is not None
        self.times_ns.append(last.times_ns)


async def test_parts_come_in_order_and_then_the_end() -> None:
    call = ask()
    call.feed(part(b"a"))
    call.feed(part(b"b"))
    call.feed(part(b"", finish="stop", prompt_tokens=5))
    got = [await call.next_part() for _ in range(4)]
    assert got == [HttpPart(b"a"), HttpPart(b"b"), HttpPart(b""), None]
    assert call.done and call.prompt_tokens == 5


async def test_a_reader_waits_for_the_next_part() -> None:
    call = ask()
    reading = asyncio.create_task(call.next_part())
    await asyncio.sleep(0)
    assert not reading.done()
    call.feed(part(b"a"))
    assert await asyncio.wait_for(reading, 5) == HttpPart(b"a")


async def test_a_failure_is_raised_after_what_has_come() -> None:
    call = ask()
    call.feed(part(b"a"))
    call.fail(WorkerLost("gone"))
    assert await call.next_part() == HttpPart(b"a")
    with pytest.raises(WorkerLost, match="gone"):
        await call.next_part()


async def test_the_worker_may_send_as_much_more_as_was_read() -> None:
    call, windows = ask(), []
    worker = SimpleNamespace(extend_window=lambda call, size: windows.append(size))
    call.replica = cast(Any, worker)
    for data in (b"abc", b"", b"de"):
        call.feed(part(data))
    await call.next_part()
    assert windows == [], "the client may be writing it still"
    await call.next_part()
    await call.next_part()
    assert windows == [3], "what is empty opens nothing"
    call.replica = None
    call.feed(part(b"", finish="stop"))
    await call.next_part()
    assert windows == [3], "its worker is gone"


async def test_it_begins_anew_until_the_first_part_has_come() -> None:
    call = ask()
    call.meter = cast(Any, meter := Meter())
    call.observers = (call.meter,)
    assert call.rewind() and not call.proven and call.body == b"abc"
    call.feed(part(b"a"))
    assert not call.rewind() and call.proven
    assert call.body == b"", "it is kept no longer"
    assert call.first_s == call.last_s > 0
    call.feed(part(b"b"))
    assert meter.firsts == [call]
    call.feed(Delta(1, "", [], finish="stop", times_ns=(1, 2, 3)))
    assert meter.times_ns == [(1, 2, 3)]


def test_a_long_body_follows_in_pieces() -> None:
    body = b"x" * (PIECE_BYTES + 1)
    sent = ask(body).request(9)
    assert (sent.id, sent.http, sent.task) == (9, HTTP, "forward")
    assert len(sent.body) == PIECE_BYTES
