"""The measuring client against a real server that sends what it is told to, in pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from servekit.chaos.baseline_answers import BaselineAnswer
from servekit.chaos.client import Client, Question
from servekit.chaos.load import Load, Silences
from tests.polling import poll_async

QUESTION = Question("m", "say abc", 3)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(body: str) -> bytes:
    data = f"data: {body}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def text(content: str) -> bytes:
    return event('{"id":"x","choices":[{"delta":{"content":"' + content + '"}}],"usage":null}')


END = (
    event('{"id":"x","choices":[{"delta":{},"finish_reason":"length"}]}')
    + event(
        '{"id":"x","choices":[],"usage":'
        '{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'
    )
    + event("[DONE]")
    + b"0\r\n\r\n"
)
GOOD = HEAD + text("a") + text("b") + text("c") + END


@contextlib.asynccontextmanager
async def server(answer: bytes, piece: int = 1 << 20, pause_s: float = 0.0) -> AsyncIterator[str]:
    """Sends `answer` to every request, `piece` bytes at a time, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(answer), piece):
                writer.write(answer[at : at + piece])
                await writer.drain()
                await asyncio.sleep(pause_s)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
async def test_a_stream_however_it_is_cut(piece: int) -> None:
    async with server(GOOD, piece) as url:
        answer = await Client(url).await_answer(QUESTION, stream=True)
    assert answer.failure == ""
    assert (answer.text, answer.chunks, answer.dones) == ("abc", 3, 1)
    assert [usage.total_tokens for usage in answer.usages] == [10]
    assert answer.first_s is not None and answer.first_s <= answer.ended_s


async def test_a_stream_that_ends_early_is_a_failure() -> None:
    async with server(HEAD + text("a")) as url:
        answer = await Client(url).await_answer(QUESTION, stream=True)
    assert answer.text == "a"
    assert "connection was lost" in answer.failure


async def test_an_error_event_is_a_failure() -> None:
    error = event('{"error":{"message":"it died","code":"worker_lost"}}') + b"0\r\n\r\n"
    async with server(HEAD + text("a") + error) as url:
        answer = await Client(url).await_answer(QUESTION, stream=True)
    assert answer.failure == "worker_lost: it died"


async def test_a_refusal_tells_when_to_come_back() -> None:
    body = b'{"error":{"message":"full","code":"queue_full"}}'
    head = b"HTTP/1.1 429 No\r\nretry-after: 3\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with server(head + body) as url:
        answer = await Client(url).await_answer(QUESTION, stream=True)
    assert (answer.status, answer.retry_after_s) == (429, 3.0)
    assert answer.failure == "queue_full: full"


async def test_nonsense_and_silence_are_failures() -> None:
    async with server(b"SSH-2.0-nonsense\r\n\r\n") as url:
        assert "not an answer" in (await Client(url).await_answer(QUESTION, stream=False)).failure
    async with server(GOOD, piece=1, pause_s=60) as url:
        slow = await Client(url).await_answer(QUESTION, stream=True, patience_s=0.1)
        assert slow.failure == "not answered within 0.1 s"


async def test_nobody_there_is_a_failure() -> None:
    async with server(b"") as url:
        pass
    assert "cannot connect" in (await Client(url).await_answer(QUESTION, stream=True)).failure


async def test_load_keeps_its_clients_busy_and_counts_all() -> None:
    async with server(GOOD) as url:
        expected = await Client(url).await_answer(QUESTION, stream=True)
        known = [BaselineAnswer(QUESTION, expected, sure=True)]
        async with Load(Client(url), known, streams=3) as load:
            await poll_async("it is answered", lambda: load.tally.answered >= 20)
    assert load.tally.answered >= 20
    assert load.tally.clean
    assert not load.active


async def test_a_silence_is_measured_from_the_last_chunk_before() -> None:
    async with server(GOOD, piece=len(HEAD + text("a")), pause_s=0.3) as url:
        exchange = await Client(url).send_request(QUESTION, stream=True)
        await poll_async("it is answered", lambda: exchange.answer.chunks > 0)
        silences = Silences({exchange})
        await exchange.over
    [silent_s] = silences.silent_s
    assert 0.2 < silent_s < 5.0
    assert silences.longest(1) == [silent_s]
    assert silences.longest(0) == []
