"""Requests to the gateway's own application: their answers, and which are sent again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from servekit.gateway.http.asgi import ASGIApp
from servekit.gateway.http.internal_request import InternalAnswer, post_internally


async def test_the_answer_is_whole() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert (scope["path"], message["body"]) == ("/v1/a", b"asked")
        assert scope["repeats"], "what is cut off is not charged"
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
        for part in (b"one", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": part == b"one"})

    answer = await post_internally(app, "/v1/a", b"asked")
    assert answer == InternalAnswer(201, {b"a": b"b"}, b"onetwo")


async def test_an_application_that_says_nothing_is_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    answer = await post_internally(app, "/v1/a", b"")
    assert (answer.status, answer.pause_s) == (500, None)


async def test_who_gives_up_ends_the_request() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()
            await receive()
        finally:
            ended.set()

    asked: ASGIApp = app
    task = asyncio.create_task(post_internally(asked, "/v1/a", b""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 5)


@pytest.mark.parametrize(
    ("status", "headers", "pause_s"),
    [
        (200, {}, None),
        (400, {b"retry-after": b"3"}, None),
        (429, {b"retry-after": b"3"}, 3.0),
        (503, {b"retry-after": b"900"}, 30.0),
        (503, {}, 1.0),
        (503, {b"retry-after": b"soon"}, 1.0),
    ],
)
def test_refusals_that_pass_are_sent_again(
    status: int, headers: dict[bytes, bytes], pause_s: float | None
) -> None:
    assert InternalAnswer(status, headers, b"").pause_s == pause_s
