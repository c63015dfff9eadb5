"""Recordings through `servekit up`: the text of the library alone, whatever happens to workers."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import soundfile

from servekit.protocol.messages import ReplicaStatus
from tests.integration.instance import Instance, echo
from tests.polling import poll
from tests.unit.engines.hearing_model import (
    PlainWhisper,
    make_samples,
    write_wav,
    write_whisper,
)

pytestmark = pytest.mark.timeout(300)
SERVER = [sys.executable, str(Path(__file__).parents[1] / "media_server.py"), "--port", "{port}"]
PATH = "/v1/audio/transcriptions"
SHORT, LONG = write_wav(make_samples(1.5)), write_wav(make_samples(5, 1))
#: So long that its transcription can be interrupted.
LONGEST = write_wav(make_samples(80, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainWhisper:
    return PlainWhisper(folder)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Instance]:
    whisper = {
        "name": "whisper",
        "path": str(folder),
        "device": "cpu",
        "replicas": 2,
        "options": {"threads": 1, "max_audio_s": 90},
    }
    forwards = {"command": SERVER, "task": "forward"}
    server = {"name": "server", "engine": "command", "path": "media", "options": forwards}
    with Instance.up(tmp_path_factory.mktemp("up"), [echo("echo"), whisper, server]) as instance:
        instance.until_settled(120)
        yield instance


@pytest.fixture(scope="module")
def client(instance: Instance) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0)


def post(instance: Instance, file: bytes, path: str = PATH, **fields: Any) -> httpx.Response:
    form = {"model": "whisper"} | fields
    return httpx.post(
        f"{instance.url}{path}", files={"file": ("a.wav", file)}, data=form, timeout=120
    )


def test_the_openai_client_gets_the_librarys_text(
    client: openai.OpenAI, plain: PlainWhisper
) -> None:
    speech: Any = client.audio.transcriptions.create
    for file in (SHORT, LONG):
        due = plain.hear(file, task="transcribe")[0].strip()
        assert speech(model="whisper", file=("a.wav", file)).text == due
        text = speech(model="whisper", file=("a.wav", file), response_format="text")
        assert text == f"{due}\n"
        events = list(speech(model="whisper", file=("a.wav", file), stream=True))
        deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
        assert "".join(deltas).strip() == due
        assert (events[-1].type, events[-1].text) == ("transcript.text.done", due)
        assert len(deltas) > 1 or file is SHORT
        assert events[-1].usage.output_tokens == events[-1].usage.total_tokens > 0


def test_the_openai_client_gets_times(client: openai.OpenAI, plain: PlainWhisper) -> None:
    speech: Any = client.audio.transcriptions.create
    text, segments = plain.hear(LONG, task="transcribe", language="de")
    told = speech(
        model="whisper",
        file=("a.wav", LONG),
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["segment", "word"],
    )
    assert (told.text, told.duration, told.language) == (text.strip(), 5.0, "german")
    times = [(one.start, one.end, one.text) for one in told.segments]
    decode = plain.tokenizer.decode
    assert times == [
        (
            round(float(one["start"]), 2),
            round(float(one["end"]), 2),
            decode(one["tokens"], skip_special_tokens=True),
        )
        for one in segments
    ]
    assert [one.id for one in told.segments] == list(range(len(segments)))
    assert "".join(word.word for word in told.words) == re.sub(r"\s", "", text)
    only = speech(
        model="whisper",
        file=("a.wav", SHORT),
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert only.words and only.segments is None


@pytest.mark.filterwarnings("ignore:deprecated")
def test_translations(client: openai.OpenAI, plain: PlainWhisper) -> None:
    due = plain.hear(LONG, task="translate")[0].strip()
    assert client.audio.translations.create(model="whisper", file=("a", LONG)).text == due
    assert due != plain.hear(LONG, task="transcribe")[0].strip()


def test_subtitles(client: openai.OpenAI, plain: PlainWhisper) -> None:
    _, segments = plain.hear(LONG, task="transcribe", return_timestamps=True)
    speech: Any = client.audio.transcriptions.create
    srt = speech(model="whisper", file=("a", LONG), response_format="srt")
    cues = srt.strip().split("\n\n")
    assert [cue.split("\n")[0] for cue in cues] == [str(at + 1) for at in range(len(segments))]
    assert all(re.match(r"\d+\n00:00:\d\d,\d{3} --> 00:00:\d\d,\d{3}\n", cue) for cue in cues)
    vtt = speech(model="whisper", file=("a", LONG), response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:0") and vtt.count(" --> ") == len(segments)


def test_other_formats_and_rates(instance: Instance) -> None:
    for form in ("FLAC", "OGG", "MP3"):
        file = io.BytesIO()
        soundfile.write(file, make_samples(1.5, rate=44_100), 44_100, format=form)
        told = post(instance, file.getvalue(), response_format="verbose_json")
        assert told.status_code == 200, told.text
        assert told.json()["duration"] == pytest.approx(1.5, abs=0.1)


def test_many_at_once(instance: Instance, plain: PlainWhisper) -> None:
    due = {file: plain.hear(file, task="transcribe")[0].strip() for file in (SHORT, LONG)}
    with ThreadPoolExecutor(8) as clients:
        files = [SHORT, LONG] * 4
        told = list(clients.map(lambda file: post(instance, file), files))
    assert [one.json()["text"] for one in told] == [due[file] for file in files]


def stream(instance: Instance, file: bytes, **fields: str) -> Iterator[str]:
    form = {"model": "whisper", "stream": "true"} | fields
    files = {"file": ("a.wav", file)}
    with httpx.stream(
        "POST", f"{instance.url}{PATH}", files=files, data=form, timeout=120
    ) as coming:
        assert coming.status_code == 200, coming.read()
        for line in coming.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                if event["type"] == "transcript.text.done":
                    return
                yield event["delta"]


@pytest.mark.parametrize(
    "wild", [{}, pytest.param({"temperature": "0.9"}, marks=pytest.mark.lane("long"))]
)
def test_a_transcript_outlives_its_worker(instance: Instance, wild: dict[str, str]) -> None:
    due = post(instance, LONGEST, **wild).json()["text"]
    poll("nothing is seen to run", lambda: not _list_running(instance))
    coming = stream(instance, LONGEST, **wild)
    begun = [next(coming) for _ in range(3)]
    (busy,) = poll("it is seen to run", lambda: _list_running(instance))
    with ThreadPoolExecutor(1) as other:
        whole = other.submit(post, instance, LONGEST, **wild)
        os.kill(busy.pid, signal.SIGKILL)
        assert "".join([*begun, *coming]).strip() == due
        assert whole.result().json()["text"] == due
    poll("the worker is replaced", lambda: instance.replica(busy.name).restarts > 0)
    instance.until_settled(120)


@pytest.mark.lane("long")
def test_a_recording_that_is_not_streamed_outlives_its_worker(instance: Instance) -> None:
    due = post(instance, LONGEST).json()["text"]
    poll("nothing is seen to run", lambda: not _list_running(instance))
    with ThreadPoolExecutor(1) as other:
        whole = other.submit(post, instance, LONGEST)
        (busy,) = poll("it is seen to run", lambda: _list_running(instance))
        os.kill(busy.pid, signal.SIGKILL)
        assert whole.result().json()["text"] == due
    poll("the worker is replaced", lambda: instance.replica(busy.name).restarts > 0)
    instance.until_settled(120)


def _list_running(instance: Instance) -> list[ReplicaStatus]:
    return [replica for replica in instance.model("whisper").replicas if replica.running]


def test_a_client_that_leaves_makes_room(instance: Instance) -> None:
    coming = stream(instance, LONGEST)
    next(coming)
    coming.close()  # type: ignore[attr-defined]
    poll("the request is cancelled", lambda: not _list_running(instance))


def test_hostile_files_are_refused_and_harm_nothing(instance: Instance) -> None:
    restarts = [one.restarts for one in instance.model("whisper").replicas]
    beside = stream(instance, LONG)
    begun = next(beside)
    for file, words in (
        (b"", "cannot be read as audio"),
        (b"no sound" * 1000, "cannot be read as audio"),
        (SHORT[:20], "cannot be read as audio"),
        (SHORT[:-100], "cut short"),
        (SHORT[:40] + b"\xf0\xff\xff\xff" + SHORT[44:], "cut short"),
        (SHORT[:24] + b"\xff\xff\xff\xff" + SHORT[28:], "says 4294967295 samples a second"),
        (write_wav(make_samples(91)), "longer than 90 s"),
    ):
        refused = post(instance, file)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "file"), error
        assert words in error["message"]
    assert (begun + "".join(beside)).strip() == post(instance, LONG).json()["text"]
    assert [one.restarts for one in instance.model("whisper").replicas] == restarts


def test_a_broken_form_writes_nothing_into_the_log(instance: Instance) -> None:
    form = b'--b\r\ncontent-disp"osition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    refused = httpx.post(
        f"{instance.url}/v1/audio/transcriptions", content=form, headers=headers, timeout=60
    )
    assert refused.status_code == 400
    later = refused.headers["x-request-id"]
    instance.until("the request is logged", lambda: later in instance.log)
    assert "invalid character" not in instance.log


def test_what_is_refused_by_name(instance: Instance) -> None:
    for fields, param, words in (
        ({"model": "echo"}, "model", "; it is a language model; models that do: 'whisper'"),
        ({"language": "xx"}, "language", "it knows de, en, fr"),
        ({"temperature": "2"}, "temperature", "temperature"),
        ({"temperature": "warm"}, "temperature", "temperature"),
        ({"response_format": "docx"}, "response_format", "response_format"),
        ({"response_format": "srt", "stream": "true"}, "stream", "srt is not streamed"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "verbose_json only"),
        ({"include[]": "logprobs"}, "include", "include is not supported"),
    ):  # fmt: skip
        refused = post(instance, SHORT, **fields)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param), error
        assert words in error["message"]
    chat = {"model": "whisper", "messages": [{"role": "user", "content": "a"}]}
    refused = httpx.post(f"{instance.url}/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    assert "it is a speech model, for /v1/audio/transcriptions" in refused.text


def test_a_server_with_the_endpoint_gets_its_requests(instance: Instance) -> None:
    named = post(instance, SHORT, model="server")
    assert named.status_code == 200 and named.json()["text"] != post(instance, SHORT).json()["text"]


def test_it_is_documented_listed_and_counted(instance: Instance) -> None:
    document = httpx.get(f"{instance.url}/openapi.json", timeout=60).json()
    for path in (PATH, "/v1/audio/translations"):
        operation = document["paths"][path]["post"]
        assert operation["tags"] == ["audio"]
        assert list(operation["requestBody"]["content"]) == ["multipart/form-data"]
    post(instance, SHORT)
    models = httpx.get(f"{instance.url}/v1/models").json()["data"]
    tasks = {one["id"]: one["tasks"] for one in models}
    assert tasks["whisper"] == ["transcribe", "tokenize", "detokenize"]


def test_it_is_counted(instance: Instance) -> None:
    post(instance, SHORT)

    def counted() -> bool:
        told = httpx.get(f"{instance.url}/metrics", timeout=60).text.splitlines()
        ours = [line for line in told if 'model="whisper"' in line]
        done = any(line.startswith("servekit_requests_total{") for line in ours)
        written = any(line.startswith("servekit_completion_tokens_total{") for line in ours)
        named = any('gen_ai_operation_name="transcribe"' in line for line in told)
        return done and written and named

    poll("requests, tokens and durations are counted", counted)


def test_its_sound_is_heard_at_any_rate(instance: Instance) -> None:
    """The same sound, sampled more often, has the same length."""
    told = post(instance, write_wav(make_samples(2, rate=48_000), 48_000), response_format="json")
    assert told.json()["usage"] == {"type": "duration", "seconds": 2}
