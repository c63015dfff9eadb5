"""Images in the vLLM engine with its real core: the answers of the transformers library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.import_utils import is_torchvision_available

from servekit.engines.vllm.engine import VllmEngine
from servekit.errors import RequestError
from servekit.protocol.messages import ChatMessage, Image
from tests.unit.engines.harness import Harness, write_tiny_llama
from tests.unit.engines.seeing_model import (
    TOKENS_PER_IMAGE,
    write_idefics3,
    write_qwen2_vl,
    write_seeing_model,
)
from tests.unit.engines.transformers.vision.pictures import (
    BLUE,
    HISTORY,
    NONE,
    ONE,
    OTHER,
    RED,
    WIDE,
    Reference,
    paint,
    say,
)
from tests.unit.engines.transformers.vision.test_engine_images import Seeing
from tests.unit.engines.vllm.test_engine_real import ON_CPU, pytestmark, spec_of

__all__ = ["pytestmark"]

TOKENS = 24
WRITERS = {"llava": write_seeing_model, "idefics3": write_idefics3, "qwen2_vl": write_qwen2_vl}


@pytest.fixture(scope="module", params=list(WRITERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "qwen2_vl" and not is_torchvision_available():
        pytest.skip("vLLM's Qwen2-VL needs torchvision")
    tokenizer = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param), tokenizer)


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[Seeing]:
    engine = Seeing(spec_of(folder, 8), VllmEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.mark.skipif(not ON_CPU, reason="of float32")
def test_answers_are_the_library_s(seeing: Seeing, reference: Reference) -> None:
    """Alone, and all in one batch."""
    assert "images" in seeing.info.serves
    asked = [ONE, OTHER, HISTORY, NONE]
    due = [reference.ask(messages, TOKENS) for messages in asked]
    for messages, (ids, answer) in zip(asked, due, strict=True):
        assert seeing.answer(messages) == answer
        if messages is not NONE:
            assert seeing.engine.encode_images(messages, (), {}, False).ids == ids
    jobs = [seeing.ask(messages) for messages in asked * 2]
    assert [seeing.tokens(job) for job in jobs] == [answer for _, answer in due] * 2
