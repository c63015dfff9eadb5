"""A model with ears in the engine: its answers are those of the library's own `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servekit.engines.media.media_prompts import MediaEncoder
from servekit.engines.text.chat_template import ChatTemplate
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Media
from tests.unit.engines.harness import Seeing, make_spec
from tests.unit.engines.hearing_model import make_samples, write_wav
from tests.unit.engines.seeing_model import (
    LIBRARY,
    write_gemma3n,
    write_gemma3n_processor,
    write_qwen2_5_omni,
    write_qwen2_audio,
    write_whole_qwen2_5_omni,
)
from tests.unit.engines.transformers.vision.pictures import RED, Reference, say
from tests.unit.engines.transformers.vision.test_engine_images import TOKENS


def record(seed: int, duration_s: float = 1.0) -> Media:
    return Media(write_wav(make_samples(duration_s, seed)), "audio/wav")


LOW, HIGH, LONG = record(1), record(2, 0.7), record(3, 3.0)
ONE = [say("user", LOW, "What is this?")]
OTHER = [say("user", HIGH, "What is this?")]
HISTORY = [say("user", "Hear ", LOW, " and ", HIGH), say("assistant", "Fine."), say("user", HIGH)]
NONE = [say("user", "What is this?")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return write_qwen2_audio(tmp_path_factory.mktemp("qwen2_audio"), tiny_model)


@pytest.fixture(scope="module")
def ears(folder: Path) -> Iterator[Seeing]:
    engine = Seeing(make_spec(folder))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_answers_are_the_library_s(ears: Seeing, reference: Reference) -> None:
    assert "audio" in ears.info.serves and "images" not in ears.info.serves
    asked = [ONE, OTHER, NONE, HISTORY, ONE, NONE, OTHER]
    jobs = [ears.ask(messages) for messages in asked]
    due = [reference.ask(messages, TOKENS) for messages in asked]
    assert [ears.tokens(job) for job in jobs] == [answer for _, answer in due]
    assert due[0][1] != due[1][1]
    assert ears.engine.encode_media(HISTORY, (), {}, False).ids == due[3][0]


def test_where_recordings_run(ears: Seeing) -> None:
    assert "its attention cannot be replaced by a paged one" in ears.info.detail
    assert ears.info.detail.endswith("; recordings as texts")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([say("user", LOW, LONG)], "recording 2 is longer than the 2 s that the model hears"),
        ([say("user", Media(LOW.data[:900], LOW.kind))], "recording 1: the recording is cut short"),
        ([say("user", Media(b"RIFF1234WAVE", LOW.kind))], "recording 1: it cannot be read"),
        ([say("user", LOW, "an <|AUDIO|>")], "which stands for a recording"),
    ],
)
def test_what_is_refused(ears: Seeing, messages: list[ChatMessage], words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("|", "[|]")) as refused:
        ears.engine.encode_media(messages, (), {}, False)
    assert refused.value.param == "messages"
    assert ears.answer(NONE)


def test_recordings_together_are_as_long_as_one_may_be(folder: Path) -> None:
    ears = Seeing(make_spec(folder, options={"max_audio_s": 1.5}))
    try:
        assert ears.answer(ONE)
        with pytest.raises(RequestError, match=r"recording 2: the recording is longer than 0\.5 s"):
            ears.engine.encode_media([say("user", LOW, LOW)], (), {}, False)
    finally:
        ears.close()


def test_a_model_without_eyes_is_not_sent_an_image(ears: Seeing) -> None:
    with pytest.raises(RequestError):
        ears.engine.encode_media([say("user", RED)], (), {}, False)


@pytest.mark.parametrize("write", [write_qwen2_5_omni, write_whole_qwen2_5_omni])
def test_a_thinker_sees_and_hears_in_the_batch(
    write: Callable[[Path, Path], Path], tmp_path: Path, tiny_model: Path
) -> None:
    """Alone, and in a folder with what speaks, of which only the thinker is loaded."""
    written = write_qwen2_5_omni(tmp_path / "thinker", tiny_model)
    reference = Reference(written)
    model = Seeing(make_spec(write(tmp_path / "served", tiny_model)))
    try:
        assert {"audio", "images"} <= set(model.info.serves)
        assert model.info.detail.endswith("; images and recordings in the batch")
        asked = [ONE, OTHER, NONE, HISTORY, [say("user", RED, LOW, "What is this?")]]
        due = [reference.ask(messages, TOKENS)[1] for messages in asked]
        jobs = [model.ask(messages) for messages in asked]
        assert [model.tokens(job) for job in jobs] == due
        assert len({tuple(answer) for answer in due}) == len(asked)
    finally:
        model.close()


def test_gemma_3n_answers_one_at_a_time(tmp_path: Path, tiny_model: Path) -> None:
    pytest.importorskip("timm")  # which its eyes are of
    folder = write_gemma3n(tmp_path, tiny_model)
    reference, model = Reference(folder), Seeing(make_spec(folder))
    try:
        assert {"audio", "images"} <= set(model.info.serves)
        assert "recordings one at a time: its decoder takes per_layer_inputs" in model.info.detail
        for messages in (ONE, OTHER, NONE, HISTORY, [say("user", RED, LOW, "What is this?")]):
            assert model.tokens(model.ask(messages)) == reference.ask(messages, TOKENS)[1]
    finally:
        model.close()


def test_a_recording_that_the_library_would_cut_is_refused(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Its extractor says how much it hears only where it is called: 30 s, for Gemma 3n and 4."""
    write_gemma3n_processor(tmp_path, tiny_model)
    processor = LIBRARY.AutoProcessor.from_pretrained(tmp_path)
    encoder = MediaEncoder(processor, ChatTemplate(processor.tokenizer))
    with pytest.raises(RequestError, match="recording 2 is longer than the 30 s that the model"):
        encoder.encode_chat([say("user", LOW, record(1, 30.1))])
    assert encoder.encode_chat([say("user", LOW, record(1, 30.0))]).ids
