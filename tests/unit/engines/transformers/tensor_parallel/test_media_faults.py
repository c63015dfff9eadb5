"""Media over two ranks: what is sent, what is cached, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from servekit.engines.transformers.tensor_parallel import messages, plan
from servekit.protocol.messages import ChatMessage
from tests.unit.engines.harness import Seeing, assert_alive
from tests.unit.engines.seeing_model import LIBRARY
from tests.unit.engines.transformers.tensor_parallel.test_media import SEEN, TOKENS
from tests.unit.engines.transformers.vision.pictures import (
    NONE,
    ONE,
    RED,
    WIDE,
    Reference,
    say,
)

Folders = Callable[[str], Path]
Opened = Callable[..., AbstractContextManager[Seeing]]

lane = pytest.mark.lane("tensor-parallel")


@lane
def test_requests_one_at_a_time(
    media_model: Folders, two_ranks: Opened, references: Callable[[str], Reference]
) -> None:
    with two_ranks(media_model("qwen2_vl"), kind=Seeing, options={"batching": "static"}) as engine:
        assert engine.info.detail.endswith("; images as texts")
        jobs = [engine.ask(messages) for messages in SEEN]
        due = [references("qwen2_vl").ask(messages, TOKENS)[1] for messages in SEEN]
        assert [engine.tokens(job) for job in jobs] == due
        prompt = engine.engine.encode_media(ONE, (), {}, False)
        lost = engine.submit(prompt.ids[:3], media=prompt.inputs)
        engine.until(lambda: engine.ended(lost), "it is refused")
        assert "cannot read these images" in (engine.outputs[lost][0].error or "")
        assert engine.answer(ONE) == due[0]


@lane
def test_what_is_sent_and_what_is_cached(media_model: Folders, two_ranks: Opened) -> None:
    """Texts run as a whole, by one message a step; a picture is cached by its content."""
    lead = "This is a text of more than some tokens before a picture. " * 2
    asked: list[list[ChatMessage]] = [
        [say("user", lead, image, lead, RED, "?")] for image in (WIDE, RED, WIDE)
    ]
    with two_ranks(media_model("qwen2_vl"), kind=Seeing, options={"block_size": 16}) as engine:
        sent, send = list[str](), engine.engine._ranks._send_order

        def note(order: Any) -> None:
            if isinstance(order, messages.Run):
                sent.append(order.what)
            send(order)

        engine.engine._ranks._send_order = note
        engine.answer(NONE)
        assert set(sent) == {"model"}
        cached = []
        for each in asked:
            sent.clear()
            job = engine.ask(each)
            engine.tokens(job)
            cached.append(max(output.cached_tokens for output in engine.outputs[job]))
            assert set(sent) == {"embedding", "decoder", "head"}
        sent.clear()
        engine.answer(NONE)
        assert set(sent) == {"model"}
    assert cached[0] == 0 < cached[1] < cached[2]


@lane
@pytest.mark.parametrize("name", ["llava", "gemma3"], ids=["in the batch", "beside it"])
def test_pictures_that_cannot_be_read_fail_alone(
    media_model: Folders, two_ranks: Opened, references: Callable[[str], Reference], name: str
) -> None:
    """Rank 0 finds out before the other ranks hear of it."""
    full = False

    def fill(module: Any, args: Any) -> None:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with two_ranks(media_model(name), kind=Seeing) as engine:
        prompt = engine.engine.encode_media(ONE, (), {}, False)
        beside = engine.ask(NONE, max_tokens=100)
        lost = engine.submit(prompt.ids[:3], media=prompt.inputs)
        engine.until(lambda: engine.ended(lost), "it is refused")
        assert "cannot read these images" in (engine.outputs[lost][0].error or "")
        vision = engine.engine._runner.unbatched.model.vision_tower
        vision.register_forward_pre_hook(fill)
        full = True
        lost = engine.ask(ONE)
        engine.until(lambda: engine.ended(lost), "it fails")
        assert "no memory left" in (engine.outputs[lost][0].error or "")
        full = False
        assert len(engine.tokens(beside)) == 100
        assert engine.answer(ONE) == references(name).ask(ONE, TOKENS)[1]
        assert_alive(engine)


@lane
@pytest.mark.parametrize("name", ["llava", "gemma3"], ids=["in the batch", "beside it"])
def test_a_pass_that_fails_in_rank_0_alone_ends_the_engine(
    media_model: Folders, two_ranks: Opened, name: str
) -> None:
    """The others wait for rank 0 in the middle of it. No request is answered by an error."""
    full = threading.Event()

    def fill(module: Any, args: Any) -> None:
        if full.is_set():
            raise torch.OutOfMemoryError("CUDA out of memory")

    with two_ranks(media_model(name), kind=Seeing) as engine:
        died = threading.Event()
        engine.engine.on_death = died.set
        runner = engine.engine._runner
        for model in (runner.unbatched, runner.texts._model):
            model.get_decoder().layers[1].register_forward_pre_hook(fill)
        engine.answer(ONE)
        full.set()
        job = engine.ask(ONE)
        assert died.wait(60)
        assert not engine.ended(job)


def test_a_model_whose_vision_part_is_divided_too() -> None:
    small: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    small |= {"num_attention_heads": 2}
    text = small | {"vocab_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    vision = small | {"projector_input_dim": 32, "projector_output_dim": 32}
    vision |= {"vision_output_dim": 32, "image_size": 32, "patch_size": 8}
    config = LIBRARY.Llama4Config(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = LIBRARY.Llama4ForConditionalGeneration._from_config(config)
    assert "also divides vision_model." in plan.find_media_obstacle(model)


def test_a_model_whose_vision_part_is_whole(media_model: Folders) -> None:
    config = LIBRARY.AutoConfig.from_pretrained(media_model("llava"))
    with torch.device("meta"):
        model = LIBRARY.AutoModelForMultimodalLM.from_config(config)
    assert plan.find_media_obstacle(model) == ""
    assert list(plan.shared_parts(model)) == ["embedding", "decoder", "head"]
