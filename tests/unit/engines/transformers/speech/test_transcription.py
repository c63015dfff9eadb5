"""Whisper models: the library's own text and times, alone and in turns."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from servekit.engines.api.base import SpeechJob, SpeechOutput, StepOutput
from servekit.engines.transformers.sleep import device_memory
from servekit.engines.transformers.speech.transcription import SpeechRow, TranscriptionRunner
from servekit.errors import LoadError, RequestError, Unsupported
from servekit.protocol.messages import SamplingParams, SpeechParams
from tests.polling import poll
from tests.unit.engines.harness import make_spec
from tests.unit.engines.hearing_model import (
    Hearer,
    PlainWhisper,
    make_samples,
    write_wav,
    write_whisper,
)

SHORT, LONG = write_wav(make_samples(1.5)), write_wav(make_samples(6, 1))
OTHER = write_wav(make_samples(3, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("en"), multilingual=False, times=False)


@pytest.fixture(scope="module")
def hearer(folder: Path) -> Iterator[Hearer]:
    hearer = Hearer(make_spec(folder))
    yield hearer
    hearer.engine.close()


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainWhisper:
    return PlainWhisper(folder)


ASKED: list[tuple[bytes, dict[str, Any], dict[str, Any]]] = [
    (SHORT, {}, {}),
    (LONG, {}, {}),
    (SHORT, {"timestamps": "segment"}, {"return_timestamps": True}),
    (LONG, {"language": "German"}, {"language": "de"}),
    (OTHER, {"translate": True, "language": "fr"}, {"task": "translate", "language": "fr"}),
    (OTHER, {"prompt": "The lazy dog."}, {"prompt": "The lazy dog."}),
]


@pytest.mark.parametrize(("file", "asked", "library"), ASKED)
def test_it_hears_as_the_library_does(
    hearer: Hearer,
    plain: PlainWhisper,
    file: bytes,
    asked: dict[str, Any],
    library: dict[str, Any],
) -> None:
    due, segments = plain.hear(file, **{"task": "transcribe"} | library)
    job = hearer.hear(file, **asked)
    assert hearer.text(job) == due and due
    times = [(float(one["start"]), float(one["end"])) for one in segments]
    assert [(one.start_s, one.end_s) for one in hearer.segments(job)] == times


def test_recordings_in_turns_are_heard_as_alone(hearer: Hearer) -> None:
    alone = [hearer.text(hearer.hear(file, **asked)) for file, asked, _ in ASKED]
    assert len(set(alone)) == len(alone)
    before = len(hearer.batches)
    jobs = [hearer.hear(file, **asked) for file, asked, _ in ASKED]
    assert [hearer.text(job) for job in jobs] == alone
    ends = [output.id for batch in hearer.batches[before:] for output in batch if output.finish]
    assert ends.index(jobs[2]) < ends.index(jobs[1]), "a short one waits for a long one"


def make_rows(hearer: Hearer, files: list[bytes]) -> tuple[list[SpeechRow], TranscriptionRunner]:
    """Return rows of recordings for the runner of an engine that is idle."""
    runner, rows = hearer.engine._runner, []
    assert isinstance(runner, TranscriptionRunner) and runner.running == 0
    for file in files:
        speech = SpeechParams(1, language="en")
        recording = hearer.engine.read_recording(file, speech)
        rows.append(SpeechRow(SpeechJob(1, recording, SamplingParams(), speech), lambda: None))
        runner.add(rows[-1])
    return rows, runner


def run_steps(runner: TranscriptionRunner, rows: list[SpeechRow]) -> tuple[list[str], int]:
    """Run the runner to its end; return the text of each row, or its error, and the steps."""
    texts, steps = {id(row): "" for row in rows}, 0
    while runner.running:
        steps += 1
        for row, output in runner.step():
            assert isinstance(output, SpeechOutput) or output.error
            heard = (
                output.speech.segments if isinstance(output, SpeechOutput) and output.speech else ()
            )
            texts[id(row)] += output.error or "".join(segment.text for segment in heard)
    return list(texts.values()), steps


FILES = [SHORT, OTHER, LONG]


def run_alone(hearer: Hearer) -> tuple[list[str], list[int]]:
    """Return the texts of the files, one after another, and the steps."""
    texts, steps = [], []
    for file in FILES:
        rows, runner = make_rows(hearer, [file])
        [text], count = run_steps(runner, rows)
        texts.append(text)
        steps.append(count)
    return texts, steps


def test_recordings_share_steps(hearer: Hearer) -> None:
    due, alone = run_alone(hearer)
    rows, runner = make_rows(hearer, FILES)
    texts, steps = run_steps(runner, rows)
    assert texts == due and all(due)
    assert steps < max(alone) + 3 * len(FILES) < sum(alone)


def test_a_recording_that_is_cancelled_disturbs_no_other(hearer: Hearer) -> None:
    due, _ = run_alone(hearer)
    rows, runner = make_rows(hearer, FILES)
    while runner.kv_used < len(FILES) / runner.seats:
        runner.step()
    runner.step()
    rows[0].cancelled = True
    runner.cancel(rows[0])
    assert run_steps(runner, rows)[0] == ["", *due[1:]]


def test_a_recording_without_memory_disturbs_no_other(
    hearer: Hearer, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, _ = run_alone(hearer)
    rows, runner = make_rows(hearer, FILES)
    runner.step()
    with monkeypatch.context() as patch:
        patch.setattr(runner._batch, "_encode", Mock(side_effect=MemoryError))
        [(row, failed)] = runner.step()
    assert row is rows[0] and failed.error == "There is no memory left for this recording."
    assert run_steps(runner, rows)[0] == ["", *due[1:]]
    assert "transcription" not in _threads()


def test_recordings_wait_for_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(device_memory, "available_bytes", lambda spec, device: 1000)
        small = Hearer(make_spec(folder))
    assert small.info.slots == 1 and 0 < small.info.kv_cache_bytes < 2**20
    jobs = [small.hear(file, language="en") for file in FILES]
    texts = [small.text(job) for job in jobs]
    small.engine.close()
    large = Hearer(make_spec(folder, options={"slots": 3}))
    assert large.info.slots == 3
    assert [large.text(large.hear(file, language="en")) for file in FILES] == texts
    large.engine.close()


@pytest.mark.lane("long")
def test_a_model_with_other_settings_is_the_librarys(tmp_path: Path) -> None:
    write_whisper(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"repetition_penalty": 5.0}))
    hearer, plain = Hearer(make_spec(tmp_path)), PlainWhisper(tmp_path)
    assert hearer.info.detail.endswith("recordings take turns, for repetition_penalty of the model")
    jobs = [hearer.hear(file) for file in FILES]
    assert [hearer.text(job) for job in jobs] == [
        plain.hear(f, task="transcribe")[0] for f in FILES
    ]
    hearer.engine.close()


def test_a_segment_comes_with_its_window(hearer: Hearer) -> None:
    outputs = hearer.spoken(hearer.hear(LONG))
    assert len(outputs) > 3 and [one.finish for one in outputs[-2:]] == [None, "stop"]
    told = outputs[0].speech
    assert told is not None
    assert told.language in ("english", "german", "french") and told.duration_s == 6


def test_words_have_times(hearer: Hearer, plain: PlainWhisper) -> None:
    due, library = plain.hear(LONG, task="transcribe", return_token_timestamps=True)
    job = hearer.hear(LONG, timestamps="word")
    segments = hearer.segments(job)
    words = [word for segment in segments for word in segment.words]
    assert "".join(word.text for word in words) == hearer.text(job) == due
    assert len(words) > len(segments) == len(library)
    assert all(0 <= word.start_s <= word.end_s <= 6.1 for word in words)
    # what follows is heard with the attention of before
    assert hearer.text(hearer.hear(SHORT)) == plain.hear(SHORT, task="transcribe")[0]


def test_scores_are_told_with_times(hearer: Hearer) -> None:
    (segment, *_) = hearer.segments(hearer.hear(SHORT, timestamps="segment"))
    assert segment.logprob is not None and -10 < segment.logprob < 0 < segment.compression
    (segment, *_) = hearer.segments(hearer.hear(SHORT))
    assert segment.logprob is None


def test_a_seed_or_the_file_determines_samples(hearer: Hearer) -> None:
    def hear(seed: int | None, file: bytes = LONG) -> str:
        return hearer.text(hearer.hear(file, SamplingParams(temperature=1.0, seed=seed)))

    first, other, own = hear(5), hear(6), hear(None)
    assert len({first, other, own}) == 3
    jobs = [hearer.hear(LONG, SamplingParams(temperature=1.0, seed=seed)) for seed in (5, 6, None)]
    assert [hearer.text(job) for job in jobs] == [first, other, own], "in turns"


def test_a_cancelled_recording_ends_within_its_window(hearer: Hearer) -> None:
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
        ({"prompt": "a <|de|> b"}, "prompt", "disallowed special token"),
    ]
    for asked, param, words in refusals:
        with pytest.raises(RequestError, match=words) as refused:
            hearer.hear(SHORT, **asked)
        assert refused.value.param == param
    with pytest.raises(RequestError, match="cannot be read as audio"):
        hearer.hear(b"RIFF....WAVE")


def test_a_long_prompt_is_cut_at_its_beginning(hearer: Hearer) -> None:
    job = hearer.hear(SHORT, prompt="The quick brown fox. " * 500)
    assert hearer.spoken(job)[-1].prompt_tokens == 96 // 2 - 1


def test_a_longer_recording_than_allowed_is_refused(folder: Path) -> None:
    engine: Any = Hearer(make_spec(folder, options={"max_audio_s": 2})).engine
    speech = SpeechParams(len(LONG))
    with pytest.raises(RequestError, match="longer than 2 s; send it in parts"):
        engine.read_recording(LONG, speech)
    engine.close()


def test_an_english_model_without_times(english: Path) -> None:
    hearer, plain = Hearer(make_spec(english)), PlainWhisper(english)
    for language in ("", "en", "English"):
        assert hearer.text(hearer.hear(SHORT, language=language)) == plain.hear(SHORT)[0]
    for file, asked, words in (
        (SHORT, {"translate": True}, "hears English only, and does not translate"),
        (SHORT, {"timestamps": "segment"}, "no timestamps; it transcribes up to 2 s"),
        (SHORT, {"timestamps": "word"}, "no timestamps; it transcribes up to 2 s"),
        (LONG, {}, "no timestamps; it transcribes up to 2 s"),
        (SHORT, {"language": "de"}, "it knows en"),
    ):
        with pytest.raises(RequestError, match=words):
            hearer.hear(file, **asked)
    hearer.engine.close()


def test_other_models_hear_nothing_and_it_writes_nothing(hearer: Hearer) -> None:
    assert hearer.info.serves == ("transcribe", "tokenize", "detokenize")
    with pytest.raises(Unsupported, match="does not generate text"):
        hearer.submit("Hello")


def test_it_runs_on_one_gpu(folder: Path) -> None:
    with pytest.raises(LoadError, match="such a model runs on one GPU"):
        Hearer(make_spec(folder, gpus=2, parallel="tensor"))


def test_a_model_that_goes_round_in_circles_is_stopped(hearer: Hearer) -> None:
    runner = hearer.engine._runner
    assert isinstance(runner, TranscriptionRunner)
    model = runner._model
    kept = type(model)._retrieve_segment

    def read_nothing(**window: Any) -> Any:
        return kept(**window)[0], 0

    type(model)._retrieve_segment = staticmethod(read_nothing)
    try:
        job = hearer.hear(LONG)
        hearer.until(lambda: _failed(hearer.outputs.get(job, [])) is not None, "it fails")
    finally:
        type(model)._retrieve_segment = staticmethod(kept)
    failed = _failed(hearer.outputs[job])
    assert failed is not None and failed.param == "file"
    assert "does not come further than 0.00 s" in (failed.error or "")
    assert hearer.text(hearer.hear(SHORT))


def _failed(outputs: list[StepOutput]) -> StepOutput | None:
    return next((one for one in outputs if one.error), None)


def test_sleep_and_wake(folder: Path) -> None:
    hearer = Hearer(make_spec(folder))
    before = hearer.text(hearer.hear(LONG))
    hearer.engine.sleep()
    hearer.engine.wake()
    assert hearer.text(hearer.hear(LONG)) == before
    hearer.engine.close()


@pytest.mark.parametrize(("timestamps", "tokens_told"), [("segment", 0), ("word", 1)])
def test_each_layer_and_each_token_show_progress(
    hearer: Hearer, timestamps: Any, tokens_told: int
) -> None:
    told: list[int] = []
    speech = SpeechParams(1, language="en", timestamps=timestamps)
    recording = hearer.engine.read_recording(LONG, speech)
    job = SpeechJob(1, recording, SamplingParams(max_tokens=1), speech)
    row, runner = SpeechRow(job, lambda: told.append(1)), hearer.engine._runner
    assert runner.running == 0
    runner.add(row)
    windows = tokens = 0
    while runner.running:
        for _, output in runner.step():
            windows, tokens = windows + 1, tokens + len(output.token_ids)
    assert windows >= 3 and tokens == windows, "a step is a token at most"
    assert len(told) == windows * (2 + tokens_told), "two layers; the library has longer steps"
