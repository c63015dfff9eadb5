"""faster-whisper's own text and times, alone and in batches."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faster_whisper import WhisperModel

from servekit.engines.api.base import SpeechJob, StepOutput
from servekit.engines.faster_whisper.transcription import SpeechRow, TranscriptionRunner
from servekit.errors import RequestError, Unsupported
from servekit.protocol.messages import SamplingParams, SpeechParams
from tests.polling import poll
from tests.unit.engines.ctranslate2_model import PlainFasterWhisper, write_ctranslate2
from tests.unit.engines.faster_whisper.conftest import open_hearer
from tests.unit.engines.hearing_model import RATE, Hearer, make_samples, write_wav

SHORT, LONG = write_wav(make_samples(3.5)), write_wav(make_samples(80, 1))
OTHER = write_wav(make_samples(20, 2))
ASKED: list[tuple[bytes, dict[str, Any], dict[str, Any]]] = [
    (SHORT, {"language": "en"}, {"language": "en"}),
    (LONG, {"language": "German"}, {"language": "de"}),
    (LONG, {}, {}),
    (SHORT, {"timestamps": "segment", "language": "en"}, {"without_timestamps": False}),
    (OTHER, {"translate": True, "language": "fr"}, {"task": "translate", "language": "fr"}),
    (
        LONG,
        {"prompt": "The lazy dog.", "language": "en"},
        {"initial_prompt": "The lazy dog.", "language": "en"},
    ),
    (
        LONG,
        {"timestamps": "word", "language": "en"},
        {"word_timestamps": True, "without_timestamps": False, "language": "en"},
    ),
]


def list_times(hearer: Hearer, job: int) -> list[tuple[float, float, str]]:
    return [(one.start_s, one.end_s, one.text) for one in hearer.segments(job)]


@pytest.mark.parametrize(("file", "asked", "library"), ASKED)
def test_it_hears_as_the_library_does(
    hearer: Hearer,
    plain: PlainFasterWhisper,
    file: bytes,
    asked: dict[str, Any],
    library: dict[str, Any],
) -> None:
    if asked.get("language") == "en":
        library = library | {"language": "en"}
    text, segments = plain.hear(file, **library)
    job = hearer.hear(file, **asked)
    assert list_times(hearer, job) == [(one.start, one.end, one.text) for one in segments]
    assert hearer.text(job) == text and text
    words = [word for one in hearer.segments(job) for word in one.words]
    due = [word for one in segments for word in one.words or ()]
    assert [(one.text, one.start_s, one.end_s) for one in words] == [
        (one.word, one.start, one.end) for one in due
    ]
    assert bool(words) == (asked.get("timestamps") == "word")


@pytest.mark.parametrize(
    ("options", "library"),
    [
        ({"beam_size": 1}, {"beam_size": 1}),
        ({"condition_on_previous_text": True}, {"condition_on_previous_text": True}),
        ({"max_new_tokens": 5, "beam_size": 1}, {"max_new_tokens": 7, "beam_size": 1}),
    ],
)
def test_options_are_the_librarys(
    folder: Path, plain: PlainFasterWhisper, options: dict[str, Any], library: dict[str, Any]
) -> None:
    hearer = open_hearer(folder, **options)
    [job] = [hearer.hear(LONG, language="de")]
    if "max_new_tokens" in options:
        # the library counts a prompt of three tokens, and CTranslate2 writes half of the sum
        assert all(len(one.token_ids) <= 5 for one in hearer.spoken(job))
    assert hearer.text(job) == plain.hear(LONG, language="de", **library)[0]
    hearer.engine.close()


def test_a_window_that_is_silent_is_left_out(folder: Path, plain: PlainFasterWhisper) -> None:
    hearer = open_hearer(folder, no_speech_threshold=0.0)
    due, _ = plain.hear(LONG, language="de", no_speech_threshold=0.0, log_prob_threshold=-1.0)
    job = hearer.hear(LONG, language="de")
    assert hearer.text(job) == due
    assert due != plain.hear(LONG, language="de")[0]
    hearer.engine.close()


def test_what_is_no_speech_is_left_out_by_silero(folder: Path) -> None:
    hearer = open_hearer(folder, vad_filter=True)
    outputs = hearer.spoken(hearer.hear(LONG))
    assert [(one.finish, one.speech and one.speech.segments) for one in outputs] == [("stop", ())]
    assert outputs[0].speech and outputs[0].speech.duration_s == 80
    hearer.engine.close()


def test_times_are_those_of_the_whole_recording(
    folder: Path, plain: PlainFasterWhisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silero finds no speech in tones, so that the places are given here."""
    from faster_whisper import transcribe, vad

    places = [{"start": 5 * RATE, "end": 30 * RATE}, {"start": 40 * RATE, "end": 75 * RATE}]
    for module in (transcribe, vad):
        monkeypatch.setattr(module, "get_speech_timestamps", lambda *_: places)
    hearer = open_hearer(folder, vad_filter=True)
    job = hearer.hear(LONG, language="de")
    _, segments = plain.hear(LONG, language="de", vad_filter=True)
    assert list_times(hearer, job) == [(one.start, one.end, one.text) for one in segments]
    assert list_times(hearer, job)[0][0] >= 5
    hearer.engine.close()


def test_recordings_together_are_heard_as_alone(hearer: Hearer) -> None:
    alone = [hearer.text(hearer.hear(file, **asked)) for file, asked, _ in ASKED]
    jobs = [hearer.hear(file, **asked) for file, asked, _ in ASKED]
    assert [hearer.text(job) for job in jobs] == alone


def test_recordings_share_calls(hearer: Hearer, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, calls = hearer.engine._runner, list[int]()
    write = runner._write_windows

    def count(rows: list[SpeechRow]) -> None:
        calls.append(len(rows))
        write(rows)

    speech = SpeechParams(len(LONG), language="de")
    rows = []
    for _ in range(3):
        recording = hearer.engine.read_recording(LONG, speech)
        rows.append(SpeechRow(SpeechJob(1, recording, SamplingParams(), speech), lambda: None))
    monkeypatch.setattr(runner, "_write_windows", count)
    for row in rows:
        runner.add(row)
    texts = run_steps(runner, rows)
    assert len(set(texts)) == 1 and set(calls) == {3}
    runner.seats, calls[:] = 2, []
    rows = [SpeechRow(row.job, lambda: None) for row in rows]
    for row in rows:
        runner.add(row)
    assert run_steps(runner, rows) == texts and set(calls) <= {1, 2}
    runner.seats = 8


def run_steps(runner: TranscriptionRunner, rows: list[SpeechRow]) -> list[str]:
    """Run the runner to its end; return the text of each row, or its error."""
    texts = {id(row): "" for row in rows}
    while runner.running:
        for row, output in runner.step():
            heard: Any = getattr(output, "speech", None)
            texts[id(row)] += output.error or "".join(one.text for one in heard.segments)
    return list(texts.values())


def test_a_recording_without_memory_disturbs_no_other(
    hearer: Hearer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = hearer.engine._runner
    due = hearer.text(hearer.hear(SHORT))

    def lack(rows: list[SpeechRow]) -> None:
        raise RuntimeError("CUDA failed with error out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_write_windows", lack)
        job = hearer.hear(LONG)
        hearer.until(lambda: hearer.ended(job), "it fails")
    assert hearer.outputs[job][-1].error == "There is no memory left for this recording."
    assert hearer.text(hearer.hear(SHORT)) == due
    assert "transcription" not in _threads()


def test_an_error_of_the_model_ends_the_engine(folder: Path) -> None:
    hearer = open_hearer(folder)

    def fail(rows: list[SpeechRow]) -> None:
        raise RuntimeError("CUDA failed with error unspecified launch failure")

    hearer.engine._runner._write_windows = fail
    job = hearer.hear(SHORT)
    poll("the engine ends", lambda: hearer.engine.fatal is not None)
    assert "unspecified launch failure" in str(hearer.engine.fatal)
    assert job not in hearer.outputs, "it goes on in another worker"
    hearer.engine._runner.close()  # its process would have ended


def test_a_segment_comes_with_its_window(hearer: Hearer) -> None:
    outputs = hearer.spoken(hearer.hear(LONG))
    assert len(outputs) >= 3 and [one.finish for one in outputs[-2:]] == [None, "stop"]
    told = outputs[0].speech
    assert told is not None and told.repeats
    assert told.language in ("english", "german", "french") and told.duration_s == 80
    segments = hearer.segments(hearer.hear(LONG))
    assert [one.seek for one in segments] == sorted(one.seek for one in segments)
    assert all(one.no_speech is not None and 0 <= one.no_speech <= 1 for one in segments)
    assert all(one.logprob is not None and one.logprob < 0 for one in segments)
    assert all(one.token_ids for one in outputs[:-1])


def test_samples_are_told_to_be_different_each_time(hearer: Hearer) -> None:
    params = SamplingParams(temperature=1.0)
    jobs = [hearer.hear(LONG, params) for _ in range(2)]
    assert hearer.text(jobs[0]) != hearer.text(jobs[1])
    heard = [output.speech for output in hearer.spoken(jobs[0])]
    assert heard and not any(one.repeats for one in heard if one)
    with pytest.raises(Unsupported, match="samples are not the same each time") as refused:
        hearer.hear(SHORT, SamplingParams(temperature=1.0, seed=5))
    assert refused.value.param == "seed"
    assert hearer.text(hearer.hear(SHORT, SamplingParams(seed=5)))


@pytest.mark.lane("long")
def test_a_window_is_written_again_at_higher_temperatures(folder: Path) -> None:
    """Random text is unlikely."""
    hearer = open_hearer(folder, fallback=True)
    told = hearer.spoken(hearer.hear(LONG, timestamps="word"))
    assert told[-1].finish == "stop" and not any(one.speech.repeats for one in told if one.speech)
    assert hearer.text(hearer.hear(OTHER))
    hearer.engine.close()


def test_a_cancelled_recording_ends_with_its_window(hearer: Hearer) -> None:
    job = hearer.hear(write_wav(make_samples(600)))
    hearer.until(lambda: job in hearer.outputs, "it has begun")
    hearer.engine.cancel(job)
    poll("it has left", lambda: not hearer.engine.load_now().running)
    assert not any(output.finish for output in hearer.outputs[job])
    poll("its thread ends", lambda: "transcription" not in _threads())
    assert hearer.text(hearer.hear(SHORT))


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_what_cannot_be_heard_is_refused(hearer: Hearer) -> None:
    refusals: list[tuple[dict[str, Any], str, str]] = [
        ({"language": "klingon"}, "language", "does not know 'klingon'; it knows de, en, fr"),
        ({"prompt": "a <|de|> b"}, "prompt", "special tokens"),
    ]
    for asked, param, words in refusals:
        with pytest.raises(RequestError, match=words) as refused:
            hearer.hear(SHORT, **asked)
        assert refused.value.param == param
    with pytest.raises(RequestError, match="cannot be read as audio"):
        hearer.hear(b"RIFF....WAVE")
    with pytest.raises(Unsupported, match="does not generate text"):
        hearer.submit("Hello")


def test_a_long_prompt_is_cut_at_its_beginning(hearer: Hearer) -> None:
    job = hearer.hear(SHORT, prompt="The quick brown fox. " * 500)
    assert hearer.spoken(job)[-1].prompt_tokens == 448 // 2 - 1


def test_a_longer_recording_than_allowed_is_refused(folder: Path) -> None:
    hearer = open_hearer(folder, max_audio_s=2)
    with pytest.raises(RequestError, match="longer than 2 s; send it in parts"):
        hearer.hear(SHORT)
    hearer.engine.close()


def test_an_english_model(tmp_path: Path) -> None:
    folder = write_ctranslate2(tmp_path, multilingual=False)
    hearer, plain = open_hearer(folder), PlainFasterWhisper(folder)
    for language in ("", "en", "English"):
        assert hearer.text(hearer.hear(LONG, language=language)) == plain.hear(LONG)[0]
    with pytest.raises(RequestError, match="it knows en"):
        hearer.hear(SHORT, language="de")
    with pytest.raises(RequestError, match="hears English only, and does not translate"):
        hearer.hear(SHORT, translate=True)
    hearer.engine.close()


def test_a_model_with_few_places(tmp_path: Path) -> None:
    folder = write_ctranslate2(tmp_path, max_target_positions=64)
    hearer = open_hearer(folder)
    assert hearer.info.max_context == 64
    assert (
        hearer.spoken(hearer.hear(LONG, prompt="The quick brown fox. " * 50))[-1].finish == "stop"
    )
    hearer.engine.close()


def test_a_model_that_goes_round_in_circles_is_stopped(
    hearer: Hearer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = WhisperModel._split_segments_by_timestamps

    def read_nothing(*args: Any, seek: int, **kwargs: Any) -> Any:
        segments, _, ending = cut(*args, seek=seek, **kwargs)
        return segments, seek, ending

    with monkeypatch.context() as patch:
        patch.setattr(WhisperModel, "_split_segments_by_timestamps", read_nothing)
        job = hearer.hear(LONG)
        hearer.until(lambda: hearer.ended(job), "it fails")
    failed: StepOutput = hearer.outputs[job][-1]
    assert failed.param == "file" and "does not come further than 0.00 s" in (failed.error or "")
    assert hearer.text(hearer.hear(SHORT))


def test_silence_is_heard(hearer: Hearer) -> None:
    silence = write_wav(np.zeros(1600, np.float32))
    assert hearer.spoken(hearer.hear(silence, SamplingParams(max_tokens=2)))[-1].finish == "stop"


def test_work_on_a_cpu_is_progress(hearer: Hearer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, goes_on = hearer.engine, threading.Event()
    write, began = engine._runner._write_windows, threading.Event()

    def wait(rows: list[SpeechRow]) -> None:
        began.set()
        assert goes_on.wait(60)
        write(rows)

    monkeypatch.setattr(engine._runner, "_write_windows", wait)
    job = hearer.hear(SHORT)
    assert began.wait(60)
    engine._progress_at -= 1000.0
    engine._seen = time.monotonic() - 1000.0, time.process_time()
    assert engine.load_now().progress_age_s >= 1000, "it waits"
    engine._seen = time.monotonic() - 10.0, time.process_time() - 9.0
    assert engine.load_now().progress_age_s < 10, "it works"
    goes_on.set()
    assert hearer.text(job)
