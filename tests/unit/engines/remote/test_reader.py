"""From the bytes of an answer to what it says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from servekit.engines.remote import reader
from servekit.engines.remote.client import Endpoint
from servekit.engines.remote.reader import MAX_EVENT_BYTES, drain_reply, read_reply
from servekit.engines.remote.response_parser import ResponseParser
from servekit.errors import EndpointFailed
from servekit.protocol.messages import Generate, SamplingParams
from tests.unit.engines.remote.liar import (
    DONE,
    Script,
    delta,
    event,
    lying,
    said,
    status,
    stream,
    usage,
    whole,
)
from tests.unit.engines.remote.test_client import asking, reaching


async def heard(endpoint: Endpoint) -> tuple[list[str], ResponseParser]:
    """What was told at a time, and the answer."""
    answer = ResponseParser(Generate(1, SamplingParams(), messages=[]), 10, 2**20)
    told: list[str] = []
    async with endpoint.send_call(asking()) as reply:
        await read_reply(reply, answer, lambda: told.append(answer.piece(1).text))
        told.append(answer.piece(1, last=True).text)
        await drain_reply(reply)
    return told, answer


ENDS = {
    "as it should be": (delta("a"), delta("b"), delta(None, "stop"), usage(), DONE),
    "no counts": (delta("a"), delta("b"), delta(None, "length"), DONE),
    "no [DONE]": (delta("a"), delta("b"), delta(None, "stop"), usage()),
    "neither": (delta("a"), delta("b"), delta(None, "stop")),
    "no finish_reason": (delta("a"), delta("b"), DONE),
    "all in one": (delta("a") + delta("b") + delta(None, "stop") + usage() + DONE,),
    "no choices at first": (event({"choices": []}), delta("ab"), delta(None, "stop"), DONE),
    "no empty line at the end": (delta("a"), delta("b", "stop").rstrip()),
    "more after the end": (delta("ab", "stop"), usage(), delta("c"), DONE),
    "a lie after the end": (delta("ab", "stop"), event(b"{")),
}


@pytest.mark.parametrize("name", ENDS)
async def test_ends_that_are_taken_for_one(name: str) -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [stream(*ENDS[name])]
        told, answer = await heard(endpoint)
        assert "".join(told) == "ab"
        assert answer.finish is not None
        counted = usage() in b"".join(ENDS[name])
        assert (answer.prompt_tokens, answer.completion_tokens) == ((7, 3) if counted else (10, 1))


async def test_text_is_told_as_it_comes() -> None:
    more = asyncio.Event()
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [stream(delta("one"), hold=more)]
        answer, told = (
            ResponseParser(Generate(1, SamplingParams(), messages=[]), 1, 99),
            asyncio.Event(),
        )
        async with endpoint.send_call(asking()) as reply:
            task = asyncio.ensure_future(read_reply(reply, answer, told.set))
            async with asyncio.timeout(60):
                await told.wait()
            assert answer.piece(1).text == "one"
            more.set()
            with pytest.raises(EndpointFailed, match="before its end"):
                await task


WRONG: dict[str, tuple[Script, str]] = {
    "it breaks off": (stream(delta("a"), ends=False), "broke off"),
    "it stops": (stream(delta("a")), "broke off before its end"),
    "broken JSON": (stream(delta("a"), event(b'{"choices": [')), "answer is wrong"),
    "no choices": (stream(event({"choices": []}), DONE), "no choices"),
    "nothing but its end": (stream(DONE), "no choices"),
    "an error in the stream": (stream(delta("a"), event({"error": {"message": "hot"}})), "hot"),
    "an error with 200": (status(200, "out of order"), "out of order"),
    "a page": (whole(b"<html>log in</html>", "text/html"), "'text/html', not a stream"),
    "no kind": (whole(b"data: x\n\n", ""), "not a stream of events"),
    "JSON that is none": (whole(b"{"), "answer is wrong"),
    "JSON without choices": (whole(b"{}"), "no choices"),
    "a line without an end": (
        stream(*[b"data: " + b"x" * 2**19] + [b"x" * 2**19] * 12),
        f"more than {MAX_EVENT_BYTES} bytes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_none(name: str) -> None:
    script, words = WRONG[name]
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [script]
        with pytest.raises(EndpointFailed, match=words):
            await heard(endpoint)
        assert len(liar.asked) == 1, "it has answered: it is not asked again"
        await liar.until(lambda: not liar.open)


async def test_an_answer_in_one_piece() -> None:
    body: Any = (
        b'{"choices": [{"message": {"content": "whole"}, "finish_reason": "stop"}],'
        b' "usage": {"prompt_tokens": 4, "completion_tokens": 2}}'
    )
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [whole(body, "application/json; charset=utf-8")]
        told, answer = await heard(endpoint)
        assert ("".join(told), answer.prompt_tokens, answer.completion_tokens) == ("whole", 4, 2)


async def test_who_does_not_hang_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_AFTERWARDS_S", 0.1)
    monkeypatch.setattr(reader, "_DRAIN_S", 0.1)
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers += [stream(delta("a", "stop"), hold=asyncio.Event())]
        liar.answers += [stream(delta("a", "stop"), usage(), DONE, hold=asyncio.Event())]
        async with asyncio.timeout(60):
            _, without = await heard(endpoint)
            _, counted = await heard(endpoint)
        assert (without.completion_tokens, counted.completion_tokens) == (1, 3)


async def test_a_connection_is_used_again_after_a_stream() -> None:
    async with lying() as liar, reaching(liar.url) as endpoint:
        liar.answers.extend([said("a", "b")] * 3)
        for _ in range(3):
            await heard(endpoint)
        assert liar.connections == 1
