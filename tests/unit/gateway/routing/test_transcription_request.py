"""A transcription in flight: its segments, and what a worker that takes over repeats."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from servekit.errors import WorkerLost
from servekit.gateway.routing.failures import retry_policy
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.transcription_request import TranscriptionCall
from servekit.gateway.telemetry.observer import RequestObserver
from servekit.protocol.forwarding import PIECE_BYTES
from servekit.protocol.messages import (
    Continuation,
    Delta,
    SamplingParams,
    SpeechParams,
    SpokenSegment,
    Transcript,
)


def call(*, stream: bool = True, file: bytes = b"RIFF") -> TranscriptionCall:
    speech = SpeechParams(len(file))
    return TranscriptionCall("m", SamplingParams(), speech, file, stream=stream, key="k")


def segment(number: int) -> SpokenSegment:
    return SpokenSegment(f"s{number}", float(number), number + 1.0)


def heard(*numbers: int, repeats: bool = True, **fields: Any) -> Delta:
    segments = tuple(map(segment, numbers))
    return Delta(1, "", speech=Transcript(segments, "english", 9.5, repeats), **fields)


async def test_segments_come_as_they_are_heard_and_then_none() -> None:
    asked = call()
    asked.feed(heard(0, 1))
    assert await asked.next_segments() == [segment(0), segment(1)]
    waiting = asyncio.create_task(asked.next_segments())
    await asyncio.sleep(0)
    assert not waiting.done()
    asked.feed(heard(2))
    assert await asyncio.wait_for(waiting, 30) == [segment(2)]
    asked.feed(heard(3, finish="stop", prompt_tokens=7))
    assert await asked.next_segments() == [segment(3)]
    assert await asked.next_segments() == []
    assert (asked.language, asked.duration_s, asked.prompt_tokens) == ("english", 9.5, 7)
    assert asked.segments == [segment(number) for number in range(4)]


async def test_a_call_begins_without_anything_heard() -> None:
    asked = call()
    assert (asked.segments, asked.language, asked.duration_s) == ([], "", 0.0)
    assert asked.first_s == 0.0
    asked.feed(heard())
    assert asked.first_s > 0, "the first window is the first token, also a silent one"


async def test_a_failure_reaches_who_waits_behind_what_was_heard() -> None:
    asked = call()
    asked.feed(heard(0))
    asked.fail(WorkerLost("it died"))
    assert await asked.next_segments() == [segment(0)]
    with pytest.raises(WorkerLost):
        await asked.next_segments()
    whole = call(stream=False)
    whole.fail(WorkerLost("it died"))
    with pytest.raises(WorkerLost):
        await whole.until_done()


async def test_a_whole_answer_wakes_its_reader_at_the_end_only() -> None:
    asked = call(stream=False)
    waiting = asyncio.create_task(asked.until_done())
    await asyncio.sleep(0)
    asked.feed(heard(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    asked.feed(heard(1, finish="stop"))
    await asyncio.wait_for(waiting, 30)
    assert asked.segments == [segment(0), segment(1)]


async def test_the_file_goes_in_pieces_and_is_forgotten_at_the_end() -> None:
    asked = call(file=b"x" * (PIECE_BYTES + 1))
    request = asked.request(3)
    assert (request.id, request.task, len(request.body)) == (3, "transcribe", PIECE_BYTES)
    asked.feed(heard(0))
    assert len(asked.body) == PIECE_BYTES + 1, "another worker may need it"
    asked.feed(heard(1, finish="stop"))
    assert asked.body == b""


async def test_a_worker_that_takes_over_repeats_what_was_heard() -> None:
    asked = call()
    asked.request(1)
    asked.feed(heard(0, 1, continuation=Continuation("g", 0)))
    assert await asked.next_segments() == [segment(0), segment(1)]
    request = asked.request(2)
    assert request.continuation == Continuation("g", 0), "it has to be of the same generation"
    asked.feed(heard(0))
    asked.feed(heard(1, 2))
    assert await asked.next_segments() == [segment(2)]
    assert asked.segments == [segment(0), segment(1), segment(2)]


async def test_where_nothing_was_seen_the_next_worker_begins_anew() -> None:
    asked = call(stream=False)
    asked.request(1)
    asked.feed(heard(0, 1, repeats=False, continuation=Continuation("g", 0)))
    assert (asked.continuation, asked.repeats) == (None, False), "it is whole or nothing"
    asked.request(2)
    assert (asked.segments, asked.repeats) == ([], True)
    asked.feed(heard(5, finish="stop"))
    assert asked.segments == [segment(5)]


async def test_who_leaves_early_pays_for_what_was_heard() -> None:
    asked = call()
    asked.request(1)
    tokens = [50364, 2205, 50464]
    told = Transcript((SpokenSegment("s0", 0.0, 1.0, tokens=tuple(tokens)),), "english", 9.5, True)
    asked.feed(Delta(1, "", prompt_tokens=7, speech=told))
    assert (asked.prompt_tokens, asked.answer_tokens) == (7, len(tokens))


async def test_the_tokens_of_the_transcript_are_charged() -> None:
    """As its client is told. The worker has generated more, where windows meet."""

    class Bill(RequestObserver):
        used = 0

        def on_ended(self, call: InflightRequest, outcome: str, last: Delta | None) -> None:
            assert last is not None
            self.used = last.completion_tokens

    asked, bill = call(), Bill()
    asked.observers = (bill,)
    told = Transcript((SpokenSegment("s0", 0.0, 1.0, tokens=(1, 2, 3)),), "english", 9.5, True)
    asked.feed(Delta(1, "", finish="stop", completion_tokens=9, speech=told))
    assert bill.used == asked.answer_tokens == 3


async def test_a_window_is_the_proof_that_a_request_kills_nobody() -> None:
    asked = call()
    asked.request(1)
    assert asked._new == 0
    asked.feed(heard(0))
    assert asked._new == retry_policy.PROOF_TOKENS
    asked.request(2)
    assert asked._new == 0, "the next worker has to prove it again"


async def test_positions_in_the_queue_are_told_until_it_waits_no_more() -> None:
    asked = call()
    asked.place = 2
    assert await asked.next_place(3) == 2
    waiting = asyncio.create_task(asked.next_place(2))
    await asyncio.sleep(0)
    asked.place = 1
    asked.wake()
    assert await asyncio.wait_for(waiting, 30) == 1
    asked.feed(heard(0, finish="stop"))
    assert await asked.next_place(1) is None
