"""One connection, against a real socket that says what servers say, and what they should not."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servekit.bench.client import connection
from servekit.bench.client.client_protocol import Record, Target
from servekit.bench.client.connection import Exchange
from servekit.bench.client.connection_pool import Dialer, Unreachable
from servekit.bench.load_generator import request_head
from tests.unit.bench.serving import (
    CLOSE,
    DONE,
    EVENTS,
    chunked,
    completion,
    delta,
    serving,
    stream_head,
    whole,
)


async def ask(pieces: Iterable[bytes], times: int = 1) -> list[Exchange]:
    """So many requests, one after the other, to a server that answers with these pieces."""
    pieces = list(pieces)
    async with serving(lambda _: pieces) as server:
        dialer = Dialer(server.target)
        found = [await one(dialer, server.target) for _ in range(times)]
        found[0].body.append(b"%d" % server.connections)
        dialer.close()
    return found


async def one(dialer: Dialer, target: Target, body: bytes = b"{}") -> Exchange:
    connection = dialer.take_idle() or await dialer.open_connection()
    over = asyncio.get_running_loop().create_future()
    exchange = Exchange(time.monotonic(), over.set_result, keep_text=True)
    connection.send_request(request_head(target, "/x") + b"%d\r\n\r\n" % len(body) + body, exchange)
    async with asyncio.timeout(10):
        await over
    return exchange


async def record_of(*pieces: bytes) -> Record:
    return (await ask(pieces))[0].record


async def test_a_stream() -> None:
    (exchange,) = await ask([chunked(EVENTS)])
    record = exchange.record
    assert (record.outcome, record.status, record.message) == ("ok", 200, "")
    assert exchange.text == "abc"
    assert (record.chunks, record.prompt_tokens, record.output_tokens) == (3, 7, 3)
    assert record.first is not None and record.last is not None
    assert record.began <= record.first <= record.last <= record.ended


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_stream_cut_anywhere_is_the_same(data: st.DataObject) -> None:
    """At any byte: within HTTP's head, a chunk's size, a UTF-8 letter, an event."""
    events = [delta("é"), b": ping\n\n", delta("€", "stop").replace(b"\n", b"\r\n"), DONE]
    stream = chunked(events)
    at = sorted(data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=5, unique=True)))
    edges = [0, *at, len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    (exchange,) = asyncio.run(ask(pieces))
    assert exchange.record.outcome == "ok", exchange.record
    assert exchange.text == "é€"
    assert exchange.record.chunks == 2


async def test_gaps_are_between_chunks_that_bring_text() -> None:
    pieces = [stream_head("transfer-encoding: chunked")]
    for event in (delta(""), delta("a"), b": ping\n\n", delta("b"), delta("c", "stop"), DONE):
        pieces.append(b"%x\r\n%s\r\n" % (len(event), event))
    (exchange,) = await ask([*pieces, b"0\r\n\r\n"])
    counts: dict[int, int] = {}
    exchange.count_gaps(counts)
    record = exchange.record
    assert record.first is not None and record.last is not None
    assert len(exchange.gaps) == sum(counts.values()) == 2
    assert sum(exchange.gaps) == pytest.approx(record.last - record.first)
    assert record.longest_gap_s == max(exchange.gaps) > 0


async def test_thoughts_and_tool_calls_are_tokens_too() -> None:
    says = (b'{"reasoning_content":"a"}', b'{"reasoning":"b"}', b'{"tool_calls":[{"index":0}]}')
    quiet = (b'{"role":"assistant"}', b'{"tool_calls":[]}', b'{"content":null,"tool_calls":null}')
    events = [b'data: {"choices":[{"delta":%s}]}\n\n' % said for said in (*quiet, *says)]
    assert (await record_of(chunked([*events, DONE]))).chunks == 3


async def test_a_connection_is_kept_and_used_again() -> None:
    first, *others = await ask([chunked(EVENTS)], times=3)
    assert first.body[-1] == b"1", "connections"
    assert not first.reused and all(other.reused for other in others)


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    (first, second) = await ask([whole(completion(), "200 OK", "connection: close")], times=2)
    assert first.body[-1] == b"2"
    assert second.record.outcome == "ok"


@pytest.mark.parametrize("ending", ["", "HTTP/1.0"])
async def test_the_end_of_the_connection_ends_what_has_no_length(ending: str) -> None:
    stream = stream_head() + b"".join(EVENTS)
    stream = stream.replace(b"HTTP/1.1", b"HTTP/1.0") if ending else stream
    assert (await record_of(stream, CLOSE)).outcome == "ok"


async def test_an_interim_answer_is_not_the_answer() -> None:
    record = await record_of(b"HTTP/1.1 103 Early Hints\r\n\r\n", whole(completion()))
    assert (record.outcome, record.status, record.output_tokens) == ("ok", 200, 2)


async def test_a_whole_answer() -> None:
    (exchange,) = await ask([whole(completion("hello", 4))])
    assert exchange.record.outcome == "ok"
    assert (exchange.text, exchange.record.output_tokens, exchange.record.first) == (
        "hello",
        4,
        None,
    )


async def test_embeddings() -> None:
    body = {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    record = await record_of(whole(body))
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == ("ok", 9, None)


ERROR = b'data: {"error":{"message":"the worker died","code":503}}\n\n'


@pytest.mark.parametrize(
    ("pieces", "outcome", "words"),
    [
        ([whole({"error": {"message": "slow down"}}, "429 Too Many")], "http", "slow down"),
        ([whole({"detail": "Not Found"}, "404 Not Found")], "http", "Not Found"),
        ([whole(b"<html>Bad\n gateway", "502 Bad")], "http", "<html>Bad gateway"),
        ([whole({"error": {"message": "failed"}})], "frame", "failed"),
        ([chunked([delta("a"), ERROR, DONE])], "frame", "the worker died"),
        ([chunked([delta("a")])], "cut", "ended without an end"),
        ([chunked(EVENTS)[:-40], CLOSE], "cut", "connection was lost"),
        ([b"HTTP/1.1 200 OK\r\ncont", CLOSE], "cut", "connection was lost"),
        ([CLOSE], "cut", "connection was lost"),
        ([b"SSH-2.0-OpenSSH_9.7\r\n"], "protocol", "not HTTP"),
        ([whole(b"hello")], "protocol", "not an answer"),
        ([whole({"hello": 1})], "protocol", "neither choices nor data"),
        ([chunked([b"data: {oops\n\n"])], "protocol", "not an answer"),
        ([chunked([b"data: \xff\n\n"])], "protocol", "not an answer"),
        ([chunked([b'data: {"choices":3}\n\n'])], "protocol", "not an answer"),
    ],
)
async def test_what_goes_wrong_has_a_kind(pieces: list[bytes], outcome: str, words: str) -> None:
    record = await record_of(*pieces)
    assert record.outcome == outcome
    assert words in record.message


async def test_a_finished_stream_needs_no_closing_event() -> None:
    assert (await record_of(chunked([delta("a", "stop")]))).outcome == "ok"


async def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async with serving(lambda _: [whole(completion()) + whole(completion())]) as server:
        dialer = Dialer(server.target)
        assert (await one(dialer, server.target)).record.outcome == "ok"
        assert (await one(dialer, server.target)).record.outcome == "ok"
        dialer.close()
        assert server.connections == 2


async def test_nobody_there() -> None:
    async with serving(lambda _: []) as server:
        target = server.target
    with pytest.raises(Unreachable, match=r"refused|Connect call failed"):
        await Dialer(target).open_connection()


async def test_the_key_is_in_the_head() -> None:
    def answer(_: dict[str, Any]) -> list[bytes]:
        return [whole(completion())]

    async with serving(answer) as server:
        target = Target("127.0.0.1", server.port, "/v1", key="secret")
        dialer = Dialer(target)
        await one(dialer, target)
        dialer.close()
        assert "\r\nauthorization: Bearer secret\r\n" in server.heads[0]
        assert f"\r\nhost: 127.0.0.1:{server.port}\r\n" in server.heads[0]


async def test_an_answer_without_an_end_is_given_up_by_its_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_LONGEST_BODY_BYTES", 100_000)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n"
    record = await record_of(head, *[b"x" * 30_000] * 4)
    assert record.outcome == "protocol" and record.message.endswith("it is too long")
