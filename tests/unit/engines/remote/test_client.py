"""Asking an endpoint that is late, refuses, hangs up or lies, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from servekit.engines.remote import client as module
from servekit.engines.remote.client import Address, Endpoint
from servekit.engines.remote.errors import Refused
from servekit.engines.remote.rate_limiter import RateLimiter
from servekit.engines.remote.request_builder import EndpointCall, EndpointTraits, build_call
from servekit.errors import EndpointFailed
from servekit.protocol.messages import ChatMessage, Generate, SamplingParams
from tests.unit.engines.remote.liar import (
    Liar,
    Script,
    chunk,
    dropped,
    head,
    lying,
    said,
    silent,
    status,
    stream,
    whole,
)

KEY = "sk-very-secret-0123456789"


def asking() -> EndpointCall:
    request = Generate(1, SamplingParams(), messages=[ChatMessage("user", "Hi")])
    return build_call(request, EndpointTraits("kimi", {}))


def address(url: str, **fields: Any) -> Address:
    known: dict[str, Any] = {
        "url": url,
        "key": KEY,
        "headers": {},
        "slots": 4,
        "connect_timeout_s": 5.0,
        "first_byte_timeout_s": 5.0,
        "silence_timeout_s": 5.0,
        "retries": 4,
    }
    return Address(**known | fields)


@contextlib.asynccontextmanager
async def reaching(url: str, **fields: Any) -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(address(url, **fields), RateLimiter(None, None))
    try:
        yield endpoint
    finally:
        await endpoint.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.001)


async def heard(endpoint: Endpoint, **how: Any) -> bytes:
    async with endpoint.send_call(asking(), **how) as reply:
        return await reply.read_all()


async def test_what_it_is_asked_and_with_which_headers() -> None:
    async with lying() as liar, reaching(liar.url, headers={"x-team": "seven"}) as endpoint:
        assert b"Hello" in await heard(endpoint)
        [asked] = liar.asked
        assert (asked.method, asked.path) == ("POST", "/v1/chat/completions")
        assert asked.headers["authorization"] == f"Bearer {KEY}"
        assert asked.headers["accept-encoding"] == "identity"
        assert asked.headers["x-team"] == "seven"
        assert asked.headers["user-agent"].startswith("servekit/")


async def test_a_connection_is_used_again() -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        for _ in range(3):
            await heard(endpoint)
        assert liar.connections == 1


@pytest.mark.parametrize("again", [status(429), status(500), status(503), status(408), dropped(),
                                   stream(ends=True)])  # fmt: skip
async def test_before_the_first_byte_it_is_asked_again(again: Script) -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [again, again]
        assert b"Hello" in await heard(endpoint)
        assert len(liar.asked) == 3


@pytest.mark.parametrize("code", [400, 401, 403, 404, 422, 302])
async def test_what_will_not_change_is_asked_once(code: int) -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [status(code, "no", location="http://127.0.0.1:1/v1")]
        with pytest.raises(Refused, match="no"):
            await heard(endpoint)
        assert len(liar.asked) == 1


async def test_as_often_as_the_file_says() -> None:
    async with lying() as liar, reaching(liar.url, retries=2) as endpoint:
        liar.answers.extend([status(500, "broken")] * 9)
        with pytest.raises(Refused, match="answered 500: broken"):
            await heard(endpoint)
        assert len(liar.asked) == 3
        with pytest.raises(Refused):
            await heard(endpoint, patient=False)
        assert len(liar.asked) == 4


async def test_never_after_the_first_byte() -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [stream(b"data: x\n\n", ends=False)]
        with pytest.raises(EndpointFailed, match="broke off"):
            await heard(endpoint)
        assert len(liar.asked) == 1


async def test_it_is_left_alone_for_as_long_as_it_wants() -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [status(429, "slowly", retry_after="0.3")]
        began_s = time.monotonic()
        await asyncio.gather(heard(endpoint), _later(endpoint, liar))
        assert time.monotonic() - began_s >= 0.3
        assert len(liar.asked) == 3


async def _later(endpoint: Endpoint, liar: Liar) -> None:
    """A second request, once the first was told to wait: it waits, too."""
    await liar.until(lambda: len(liar.asked) == 1 and not liar.open)
    while not endpoint.pace._not_before_s:  # noqa: ASYNC110 - the answer is on its way
        await asyncio.sleep(0)
    until_s = endpoint.pace._not_before_s
    await heard(endpoint)
    assert asyncio.get_running_loop().time() >= until_s


async def test_who_wants_an_hour_is_not_waited_for() -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [status(429, "come back", retry_after="3600")]
        with pytest.raises(Refused) as told:
            await heard(endpoint)
        assert told.value.error.retry_after_s == 3600
        assert b"Hello" in await heard(endpoint)  # another request is not held up by it


async def test_no_first_byte_in_time() -> None:
    async with lying() as liar, reaching(liar.url, first_byte_timeout_s=0.1, retries=1) as endpoint:
        liar.answers += [silent(), stream(hold=asyncio.Event())]
        with pytest.raises(Refused, match=r"not a byte within 0\.1 s"):
            await heard(endpoint)
        await liar.until(lambda: liar.gone == 2)


async def test_silence_in_the_middle() -> None:
    async with lying() as liar, reaching(liar.url, silence_timeout_s=0.1) as endpoint:
        liar.answers += [stream(b"data: x\n\n", hold=asyncio.Event())]
        with pytest.raises(EndpointFailed, match=r"sent nothing for 0\.1 s"):
            await heard(endpoint)
        await liar.until(lambda: liar.gone == 1)


@pytest.mark.parametrize("answer", [silent(), stream(b"x", hold=asyncio.Event())])
async def test_a_request_that_is_cancelled_ends_there_at_once(answer: Script) -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [answer]
        task = asyncio.ensure_future(heard(endpoint))
        await liar.until(lambda: liar.open == 1)
        task.cancel()
        await liar.until(lambda: liar.gone == 1, within_s=30)
        await asyncio.gather(task, return_exceptions=True)


async def test_nobody_there() -> None:
    async with lying() as liar:
        url = liar.url
    async with reaching(url, retries=1) as endpoint:
        with pytest.raises(Refused, match="does not answer") as told:
            await heard(endpoint)
        assert told.value.error.status == 503
        with pytest.raises(Refused, match="does not answer"):
            await endpoint.get("/models", 99)


async def test_a_key_that_is_said_in_an_error_is_not_passed_on() -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [status(401, f"Incorrect API key provided: {KEY}.")]
        with pytest.raises(Refused) as told:
            await heard(endpoint)
        assert KEY not in told.value.error.message
        assert "provided: (the key)." in told.value.error.message


async def test_the_key_does_not_go_where_a_redirect_leads() -> None:
    async with lying() as other, lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [status(307, location=f"{other.url}/chat/completions")]
        with pytest.raises(Refused, match="which is not followed"):
            await heard(endpoint)
        assert not other.connections


async def test_what_is_compressed_was_not_asked_for() -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [whole(b"\x1f\x8b" + b"x" * 100, content_encoding="gzip")]
        with pytest.raises(Refused, match="encoded as 'gzip'"):
            await heard(endpoint)


def endless(start: bytes) -> Script:
    async def script(writer: asyncio.StreamWriter, asked: Any) -> None:
        writer.write(start)
        while True:
            writer.write(chunk(b"x" * 65536))
            await writer.drain()

    return script


async def test_an_endless_error_and_an_endless_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WHOLE_BYTES", 2**20)
    async with lying() as liar, reaching(liar.url, retries=0) as endpoint:
        liar.answers += [endless(head(500, transfer_encoding="chunked"))]
        with pytest.raises(Refused, match="answered 500: xxx"):
            await heard(endpoint)
        liar.answers += [endless(head(200, transfer_encoding="chunked"))]
        with pytest.raises(EndpointFailed, match="more than 1048576 bytes"):
            await heard(endpoint)
        await liar.until(lambda: liar.open == 0)


async def test_what_is_no_http() -> None:
    async def script(writer: asyncio.StreamWriter, asked: Any) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
        await writer.drain()

    async with lying() as liar, reaching(liar.url, retries=0) as endpoint:
        liar.answers += [script]
        with pytest.raises(Refused, match="does not answer"):
            await heard(endpoint)


async def test_no_more_connections_than_slots() -> None:
    async with lying() as liar, reaching(liar.url, slots=2) as endpoint:
        liar.answers.extend([said("a")] * 20)
        await asyncio.gather(*(heard(endpoint) for _ in range(20)))
        assert liar.connections <= 4
