"""Forwarded requests and responses: what is changed of them, and what is passed on as it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from servekit.engines.remote.client import Reply
from servekit.engines.remote.forwarding import UsageReader, Window, build_forward_call, read_parts
from servekit.errors import RequestError
from servekit.protocol.forwarding import WINDOW_BYTES, HttpPart, HttpRequest
from servekit.protocol.messages import Generate, SamplingParams


def forwarded(http: HttpRequest | None, body: bytes = b"", trace: str = "") -> Generate:
    return Generate(1, SamplingParams(), task="forward", http=http, body=body, trace=trace)


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("path", "query", "sent", "at_root"),
    [
        ("/v1/audio/speech", "", "/audio/speech", False),
        ("/v1/rerank", "a=1&b=2", "/rerank?a=1&b=2", False),
        ("/tokenize", "", "/tokenize", True),
        ("/props", "x=1", "/props?x=1", True),
        ("/v1beta/models", "", "/v1beta/models", True),
        ("/v1", "", "/v1", True),
    ],
)
def test_a_path_below_the_apis_base_follows_the_servers_base(
    path: str, query: str, sent: str, at_root: bool
) -> None:
    call = build_forward_call(forwarded(HttpRequest(path, query)), "theirs")
    assert (call.path, call.at_root) == (sent, at_root)


@pytest.mark.parametrize(
    ("at", "is_json", "body"),
    [
        (None, False, b'{"model": , "x": 1}'),
        (10, True, b'{"model": "the\\"irs", "x": 1}'),
        (10, False, b'{"model": the"irs, "x": 1}'),
        (0, False, b'the"irs{"model": , "x": 1}'),
    ],
)
def test_the_servers_name_of_the_model_is_inserted(
    at: int | None, is_json: bool, body: bytes
) -> None:
    http = HttpRequest("/v1/x", model_at=at, model_is_json=is_json)
    call = build_forward_call(forwarded(http, b'{"model": , "x": 1}'), 'the"irs')
    assert call.body == body
    assert call.prompt_tokens == 0, "nothing is known of them"


def test_headers_are_the_clients_and_the_trace_goes_on() -> None:
    http = HttpRequest("/v1/x", headers=((b"accept", b"audio/wav"), (b"x-name", b"\xe9")))
    assert build_forward_call(forwarded(http), "m").headers == {
        "accept": "audio/wav",
        "x-name": "é",
    }
    traced = build_forward_call(forwarded(http, trace="00-a-b-01"), "m").headers
    assert traced["traceparent"] == "00-a-b-01"


def test_a_request_without_its_http_part_is_refused() -> None:
    with pytest.raises(RequestError, match="missing"):
        build_forward_call(forwarded(None), "m")


def test_errors_of_the_key_or_of_the_moment_are_not_the_clients() -> None:
    call = build_forward_call(forwarded(HttpRequest("/v1/x")), "m")
    accepted = {status for status in range(100, 600) if call.accepts(status)}
    refused = {401, 402, 403, 407, 408, 409, 425, 429}
    assert accepted == {*range(200, 300), *range(400, 500), 501} - refused


# ---------------------------------------------------------------- responses


async def test_a_client_that_does_not_read_stops_the_response() -> None:
    window = Window()
    async with asyncio.timeout(10):
        await window.wait_open(WINDOW_BYTES - 1)
        await window.wait_open(100)  # the last piece may exceed it
        assert not window.blocks
        waiting = asyncio.create_task(window.wait_open(1))
        await asyncio.sleep(0)
        assert window.blocks and not waiting.done()
        window.extend(99)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done(), "all of that was owed"
        window.extend(1)
        await waiting
        assert not window.blocks


async def read(headers: dict[str, str], *pieces: bytes, status: int = 200) -> list[HttpPart]:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    response = httpx.Response(status, headers=headers, content=stream())
    reply = Reply(response, None, 1.0)  # type: ignore[arg-type]
    await reply.await_first_byte(forwarded=True)
    return [part async for part in read_parts(reply, Window())]


async def test_a_response_keeps_its_pieces_status_and_headers_about_the_body() -> None:
    headers = {
        "Content-Type": "audio/wav",
        "Content-Encoding": "gzip",
        "Retry-After": "1",
        "Cache-Control": "no-store",
        "Content-Disposition": "attachment",
        "Content-Language": "en",
        "Content-Length": "3",
        "Set-Cookie": "a=b",
        "Server": "theirs",
        "Connection": "close",
        "X-Api-Key": "secret",
    }
    first, second = await read(headers, b"ab", b"c", status=201)
    assert (first.data, first.status) == (b"ab", 201)
    assert second == HttpPart(b"c")
    assert sorted(name for name, _ in first.headers) == [
        *(b"cache-control", b"content-disposition", b"content-encoding", b"content-language"),
        *(b"content-length", b"content-type", b"retry-after"),
    ]


async def test_a_response_may_be_empty() -> None:
    assert await read({}, status=404) == [HttpPart(b"", 404)]


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}', (3, 4)),
        (b'{"usage": {"input_tokens": 3, "output_tokens": 4}}', (3, 4)),
        (b'{"usage": {"total_tokens": 9}}', (9, 0)),
        (b'{"usage": {"total_tokens": 9, "completion_tokens": 4}}', (5, 4)),
        (b'{"usage": {"total_tokens": 1, "output_tokens": 4}}', (0, 4)),
        (b'{"usage": {"prompt_tokens": -3, "completion_tokens": "4"}}', (0, 0)),
        (b'{"usage": null}', (0, 0)),
        (b'{"usage": 7}', (0, 0)),
        (b'{"results": []}', (0, 0)),
        (b"[1]", (0, 0)),
        (b"{", (0, 0)),
        (b"", (0, 0)),
    ],
)
def test_tokens_are_read_from_json(body: bytes, counts: tuple[int, int]) -> None:
    reader = UsageReader("application/json")
    reader.note_piece(body[:5])
    reader.note_piece(body[5:])
    assert reader.count_tokens() == counts


def test_long_responses_and_other_kinds_count_no_tokens() -> None:
    usage = b'{"usage": {"total_tokens": 9}}'
    other = UsageReader("text/plain")
    other.note_piece(usage)
    assert other.count_tokens() == (0, 0)
    limit = UsageReader("application/json")
    limit.note_piece(usage + b" " * (2**20 - len(usage)))
    assert limit.count_tokens() == (9, 0)
    limit.note_piece(b" ")
    limit.note_piece(b"")
    assert limit.count_tokens() == (0, 0)
