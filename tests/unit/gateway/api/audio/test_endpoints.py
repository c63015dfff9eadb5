"""Transcriptions over a real router and a worker that hears the words of a text file."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from servekit.engines.api.base import StepOutput
from servekit.gateway.api.audio.endpoints import TASKS, TRANSCRIPTIONS, TRANSLATIONS, Audio
from servekit.gateway.api.audio.subtitles import write_srt, write_vtt
from servekit.protocol.forwarding import PIECE_BYTES
from servekit.protocol.messages import SpokenSegment, Topology
from tests.unit.gateway import conftest
from tests.unit.gateway.conftest import EchoWorker, Service, until
from tests.unit.gateway.hearing_engine import HearingEngine

TEXT = b"one two three"


@pytest.fixture
async def hearing(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(conftest, "EchoEngine", HearingEngine)
    yield service


def engine_of(worker: EchoWorker) -> HearingEngine:
    assert isinstance(worker.engine, HearingEngine)
    return worker.engine


async def post(
    service: Service,
    file: bytes = TEXT,
    path: str = TRANSCRIPTIONS,
    most_bytes: int = 10**8,
    **fields: Any,
) -> httpx.Response:
    route = Audio(service.router, most_bytes).routes[path]
    form = {"model": "m"} | fields
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=route)) as client:
        return await client.post(
            f"http://servekit{path}", files={"file": ("a.wav", file)}, data=form
        )


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_each_path_has_its_task(service: Service) -> None:
    assert Audio(service.router, 1).routes.keys() == TASKS.keys()


async def test_the_forms_of_an_answer(hearing: Service) -> None:
    await hearing.up()
    told = await post(hearing)
    assert told.json() == {"text": "one two three", "usage": {"type": "duration", "seconds": 4}}
    plain = await post(hearing, response_format="text")
    assert (plain.text, plain.headers["content-type"]) == (
        "one two three\n",
        "text/plain; charset=utf-8",
    )
    srt = await post(hearing, response_format="srt")
    assert srt.text.startswith("1\n00:00:00,000 --> 00:00:00,750\none\n\n2\n00:00:01,000 --> ")
    vtt = await post(hearing, response_format="vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.750\none\n\n00:00:01.000")


async def test_all_that_is_known(hearing: Service) -> None:
    await hearing.up()
    form: dict[str, Any] = {"response_format": "verbose_json", "temperature": "0.5"}
    told = (await post(hearing, **form, language="german")).json()
    assert (told["task"], told["language"], told["duration"]) == ("transcribe", "german", 3.1)
    assert told["segments"][1] == {
        "id": 1, "seek": 100, "start": 1.0, "end": 1.75, "text": " two", "tokens": [1],
        "temperature": 0.5, "avg_logprob": -0.5, "compression_ratio": 1.0, "no_speech_prob": None,
    }  # fmt: skip
    assert "words" not in told
    both: dict[str, Any] = {"timestamp_granularities[]": ["word", "segment"]}
    told = (await post(hearing, **form, **both)).json()
    assert told["words"][2] == {"word": "three", "start": 2.0, "end": 2.5}
    assert len(told["segments"]) == 3
    told = (await post(hearing, **form, timestamp_granularities="word")).json()
    assert "segments" not in told and len(told["words"]) == 3
    told = (await post(hearing, path=TRANSLATIONS, **form)).json()
    assert told["task"] == "translate"
    jobs = engine_of(hearing.workers[0]).jobs
    assert [job.speech.translate for job in jobs] == [False] * 3 + [True]
    assert {job.params.temperature for job in jobs} == {0.5}


async def test_a_stream_has_events(hearing: Service) -> None:
    await hearing.up()
    answer = await post(hearing, stream="True")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    usage = {"type": "tokens", "input_tokens": 3, "output_tokens": 3, "total_tokens": 6}
    assert events_of(answer) == [
        {"type": "transcript.text.delta", "delta": "one"},
        {"type": "transcript.text.delta", "delta": " two"},
        {"type": "transcript.text.delta", "delta": " three"},
        {"type": "transcript.text.done", "text": "one two three", "usage": usage},
    ]


async def test_a_stream_with_times_has_segments_too(hearing: Service) -> None:
    await hearing.up()
    answer = await post(hearing, stream="true", response_format="verbose_json")
    events = events_of(answer)
    segment = "transcript.text.segment"
    assert events[2:4] == [
        {"type": "transcript.text.delta", "delta": " two"},
        {"type": segment, "id": "1", "start": 1.0, "end": 1.75, "text": " two"},
    ]
    assert [one["id"] for one in events if one["type"] == segment] == ["0", "1", "2"]
    done = events[-1]
    assert (done["text"], done["language"], done["duration"]) == ("one two three", "english", 3.1)
    assert [job.speech.timestamps for job in engine_of(hearing.workers[0]).jobs] == ["segment"]


async def test_who_waits_is_told_the_place(hearing: Service) -> None:
    (worker,) = await hearing.up(waits=True, slots=1)
    asked = [
        asyncio.create_task(post(hearing, stream="true", queue_position=follows))
        for follows in ("true", "TRUE", "false")
    ]
    await until(lambda: hearing.router.in_flight == 3 and engine_of(worker).jobs)
    for count in (1, 2, 3):
        await until(lambda count=count: len(engine_of(worker).jobs) == count)  # type: ignore[misc]
        engine_of(worker).hear(engine_of(worker).jobs[count - 1])
    texts = [answer.text for answer in await asyncio.gather(*asked)]
    comments = [re.findall(r"^: (.*)\n\n", text, re.MULTILINE) for text in texts]
    assert comments == [[], ["queue position 0"], []]
    assert texts[0] == texts[2] == texts[1].removeprefix(": queue position 0\n\n")


async def test_who_waits_in_vain_is_told_within_the_stream(hearing: Service) -> None:
    (worker,) = await hearing.up(waits=True, slots=1)
    form: dict[str, Any] = {"stream": "true", "queue_position": "true"}
    first = asyncio.create_task(post(hearing, **form))
    await until(lambda: engine_of(worker).jobs)
    second = asyncio.create_task(post(hearing, timeout_s="0.05", **form))
    comment, event, _ = (await second).text.split("\n\n")
    assert comment == ": queue position 0"
    assert "not done within" in json.loads(event.removeprefix("data: "))["error"]["message"]
    engine_of(worker).hear(engine_of(worker).jobs[0])
    assert events_of(await first)[-1]["text"] == "one two three"


async def test_a_long_file_comes_in_pieces(hearing: Service) -> None:
    await hearing.up()
    file = b" ".join([b"word" * 2**16] * 12)
    assert len(file) > 8 * PIECE_BYTES
    assert (await post(hearing, file)).json()["text"] == file.decode()
    assert hearing.router.in_flight == 0


async def test_a_worker_that_dies_is_replaced(hearing: Service) -> None:
    first, second = await hearing.up(2, waits=True)
    asked = [asyncio.create_task(post(hearing, stream=stream)) for stream in ("true", "false")]
    await until(lambda: len(engine_of(first).jobs) + len(engine_of(second).jobs) == 2)
    for worker in (first, second):
        for job in engine_of(worker).jobs:
            engine_of(worker).hear(job, last=2)
    dead, alive = (first, second) if engine_of(first).jobs else (second, first)
    lost = len(engine_of(dead).jobs)
    calls: list[Any] = list(hearing.router._open)
    await until(lambda: all(len(call.segments) == 2 for call in calls))
    dead.kill()
    await until(lambda: len(engine_of(alive).jobs) == 2)
    own, moved = engine_of(alive).jobs[: 2 - lost], engine_of(alive).jobs[2 - lost :]
    for job in own:
        engine_of(alive).hear(job, first=2)
    for job in moved:
        assert job.recording == TEXT.decode()
        engine_of(alive).hear(job)
    streamed, whole = await asyncio.gather(*asked)
    assert whole.json()["text"] == "one two three"
    assert [one.get("delta") for one in events_of(streamed)] == ["one", " two", " three", None]


async def test_samples_that_do_not_repeat_begin_anew_or_end(hearing: Service) -> None:
    (first,) = await hearing.up(1, waits=True)
    asked = {
        stream: asyncio.create_task(post(hearing, stream=stream, temperature="1"))
        for stream in ("true", "false")
    }
    await until(lambda: len(engine_of(first).jobs) == 2)
    for job in engine_of(first).jobs:
        engine_of(first).hear(job, last=2)
    calls: list[Any] = list(hearing.router._open)
    await until(lambda: all(len(call.segments) == 2 for call in calls))
    (second,) = await hearing.up(1)
    first.kill()
    streamed, whole = await asyncio.gather(asked["true"], asked["false"])
    assert whole.json()["text"] == "one two three"
    last = json.loads(streamed.text.split("\n\n")[-2].removeprefix("data: "))
    assert "error" in last and "three" not in streamed.text
    assert len(engine_of(second).jobs) == 1


async def test_a_failure_within_a_stream_is_its_last_event(hearing: Service) -> None:
    (worker,) = await hearing.up(waits=True)
    asked = asyncio.create_task(post(hearing, stream="true"))
    engine = engine_of(worker)
    await until(lambda: engine.jobs)
    engine.hear(engine.jobs[0], last=1)
    (call,) = hearing.router._open
    await until(lambda: call.first_s)
    engine._emit([StepOutput(engine.jobs[0].id, [], error="file: no more", param="file")])
    first, second, _ = (await asked).text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["delta"] == "one"
    assert json.loads(second.removeprefix("data: "))["error"]["message"] == "file: no more"


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_what_a_worker_refuses(hearing: Service, stream: str) -> None:
    await hearing.up()
    refused = await post(hearing, b"noise", stream=stream)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "file: it is noise")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": "1.5"}, "temperature", "temperature"),
        ({"temperature": "hot"}, "temperature", "expected `float`"),
        ({"response_format": "diarized_json"}, "response_format", "response_format"),
        ({"stream": "true", "response_format": "vtt"}, "stream", "vtt is not streamed"),
        ({"stream": "true", "response_format": "srt"}, "stream", "verbose_json streams times"),
        (
            {"stream": "1", "response_format": "verbose_json"},
            "stream",
            "expected `bool",
        ),
        (
            {
                "stream": "true",
                "response_format": "verbose_json",
                "timestamp_granularities[]": "word",
            },
            "timestamp_granularities",
            "words are not streamed",
        ),
        ({"queue_position": "soon"}, "queue_position", "expected `bool"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json only"),
        ({"timestamp_granularities[]": "line"}, "timestamp_granularities", "line"),
        ({"include[]": "logprobs"}, "include", "include is not supported"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy", "not supported"),
        ({"model": ["m", "n"]}, "model", "more than once"),
        ({"prompt": b"\xff"}, "prompt", "not valid UTF-8"),
    ],
)
async def test_wrong_fields(
    hearing: Service, fields: dict[str, Any], param: str, words: str
) -> None:
    await hearing.up()
    refused = await post(hearing, **fields)
    error = refused.json()["error"]
    assert refused.status_code == 400 and words in error["message"], error
    assert error["param"].partition("[")[0] == param
    assert not engine_of(hearing.workers[0]).jobs


async def test_harmless_fields_are_taken(hearing: Service) -> None:
    await hearing.up()
    told = await post(
        hearing, model="", language="", prompt="", temperature="", chunking_strategy="auto"
    )
    assert told.json()["text"] == "one two three"


async def ask(service: Service, body: bytes, kind: str) -> httpx.Response:
    route = Audio(service.router, 10**6).routes[TRANSCRIPTIONS]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=route)) as client:
        headers = {"content-type": kind}
        return await client.post("http://servekit/", content=body, headers=headers)


async def test_bodies_that_are_no_form_with_a_file(hearing: Service) -> None:
    await hearing.up()
    form = "multipart/form-data; boundary=b"
    model = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n'
    for body, kind, words in (
        (b'{"model": "m"}', "application/json", "send a form"),
        (b"", "", "send a form"),
        (model + b"--b--\r\n", form, "the form has no recording"),
        (model, form, "the form is incomplete"),
        (b"nonsense", form, "the form cannot be read"),
    ):
        refused = await ask(hearing, body, kind)
        assert refused.status_code == 400 and words in refused.text, refused.text
    assert (await post(hearing, b"a" * 2000, most_bytes=1000)).status_code == 413


async def test_a_model_that_cannot_names_those_that_can(service: Service) -> None:
    await service.up()
    status = service.router.routes["m"].status
    (info,) = [one.info for one in service.router.routes["m"].replicas.values()]
    assert info is not None
    known = replace(status, info=info, replicas=(service.workers[0].status(),))
    hears = replace(info, serves=("transcribe",))
    other = replace(known, name="ear", info=hears, replicas=(), aliases=())
    service.router.apply_topology(Topology((known, other)))
    refused = (await post(service)).json()["error"]
    assert refused["message"] == (
        "model: the echo engine of 'm' does not transcribe recordings; it is a language model;"
        " models that do: 'ear'"
    )


async def test_a_client_that_leaves_ends_it(hearing: Service) -> None:
    (worker,) = await hearing.up(waits=True)
    asked = asyncio.create_task(post(hearing))
    await until(lambda: engine_of(worker).jobs)
    asked.cancel()
    await until(lambda: not hearing.router.in_flight)


def test_cues_hold_no_cues() -> None:
    segments = [SpokenSegment(" a --> b\n\nc", 3599.9996, 3661.5), SpokenSegment("", -0.5, 0)]
    assert write_srt(segments) == (
        "1\n01:00:00,000 --> 01:01:01,500\na -> b c\n\n2\n00:00:00,000 --> 00:00:00,000\n\n"
    )
    assert write_vtt([]) == "WEBVTT\n"
