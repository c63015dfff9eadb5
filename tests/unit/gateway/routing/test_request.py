"""A request whose answer goes on by its text, as its engine knows no tokens."""

from __future__ import annotations

import pytest

from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import UNKNOWN_TOKEN, Continuation, Delta, SamplingParams
from servekit.protocol.tool_formats import CALL, THOUGHT

BY_TEXT = Continuation("edition.files", 20, by_text=True)


def begun(*texts: str) -> InflightRequest:
    call = InflightRequest("m", SamplingParams(max_tokens=20), prompt="p")
    call.request(1)
    for at, text in enumerate(texts):
        told = BY_TEXT if not at else None
        call.feed(Delta(1, text, [UNKNOWN_TOKEN], prompt_tokens=5, continuation=told))
    return call


async def test_the_next_worker_gets_the_text_so_far() -> None:
    call = begun("One", " two")
    call.collect()
    request = call.request(2)
    assert (request.answered, len(request.emitted)) == ("One two", 2)
    assert request.continuation == BY_TEXT
    call.feed(Delta(2, " three", [UNKNOWN_TOKEN]))
    assert call.request(3).answered == "One two three"


@pytest.mark.parametrize("mark", [THOUGHT, CALL])
async def test_thoughts_and_calls_cannot_be_continued(mark: str) -> None:
    call = begun("One", f"{mark}more", " two")
    assert (call.continuation, call.request(2).answered) == (None, "")


async def test_an_answer_that_nobody_has_seen_begins_anew() -> None:
    call = begun("One", " two")
    assert call.rewind()
    assert call.request(2).answered == ""
