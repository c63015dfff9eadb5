"""A model with ears in a real vLLM: its answers are those of the library's own `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.engines.vllm.engine import VllmEngine
from servekit.errors import RequestError
from tests.unit.engines.harness import Seeing, write_tiny_llama
from tests.unit.engines.seeing_model import write_qwen2_audio
from tests.unit.engines.transformers.vision.pictures import Reference, say
from tests.unit.engines.transformers.vision.test_engine_recordings import (
    HISTORY,
    LOW,
    NONE,
    ONE,
    OTHER,
    record,
)
from tests.unit.engines.vllm import test_engine_real as real

pytestmark = [
    *real.pytestmark,
    pytest.mark.skipif(not real.ON_CPU, reason="the arithmetic repeats in float32"),
]
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return write_qwen2_audio(tmp_path_factory.mktemp("qwen2_audio"), tokenizer, hears_s=30)


@pytest.fixture(scope="module")
def ears(folder: Path) -> Iterator[Seeing]:
    engine = Seeing(real.spec_of(folder, 8), VllmEngine)
    yield engine
    engine.close()


def test_answers_are_the_library_s(ears: Seeing, folder: Path) -> None:
    assert "audio" in ears.info.serves and "images" not in ears.info.serves
    reference, asked = Reference(folder), [ONE, OTHER, NONE, HISTORY, ONE, NONE, OTHER]
    jobs = [ears.ask(messages) for messages in asked]
    due = [reference.ask(messages, TOKENS)[1] for messages in asked]
    assert [ears.tokens(job) for job in jobs] == due
    assert due[0] != due[1]


def test_what_the_model_does_not_hear_is_refused(ears: Seeing) -> None:
    with pytest.raises(RequestError, match="recording 2 is longer than the 30 s"):
        ears.engine.encode_media([say("user", LOW, record(3, 31.0))], (), {}, False)
