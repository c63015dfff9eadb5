"""Images in the vLLM engine with its real core: the answers are the transformers library's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from transformers.utils.import_utils import is_torchvision_available

from servekit.engines.vllm.engine import VllmEngine
from servekit.errors import RequestError
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import ChatMessage, Grammar, Media
from tests.unit.engines.harness import Seeing, write_tiny_llama
from tests.unit.engines.seeing_model import write_idefics3, write_qwen2_vl, write_seeing_model
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
from tests.unit.engines.vllm import test_engine_real as real

pytestmark = [
    *real.pytestmark,
    pytest.mark.skipif(not real.ON_CPU, reason="the arithmetic repeats in float32"),
]

TOKENS = 24
WRITERS = {"llava": write_seeing_model, "idefics3": write_idefics3, "qwen2_vl": write_qwen2_vl}
#: More tokens than a block of the prefix cache, with an image in the first one.
LONG = "What is this? " * 20


@pytest.fixture(scope="module", params=list(WRITERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # that of LLaVA in vLLM 0.28 and 0.30 does not import with the newest transformers
    pytest.importorskip(f"vllm.model_executor.models.{request.param}", exc_type=ImportError)
    if request.param == "qwen2_vl" and not is_torchvision_available():
        pytest.skip("the library reads its images with torchvision only")
    tokenizer = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param), tokenizer)


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[Seeing]:
    engine = Seeing(real.spec_of(folder, 8, max_loras=1), VllmEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def encode(seeing: Seeing, messages: list[ChatMessage]) -> list[int]:
    ids: list[int] = seeing.engine.encode_media(messages, (), {}, False).ids
    return ids


def test_answers_are_the_library_s(seeing: Seeing, reference: Reference) -> None:
    """Each alone, and all in one batch."""
    assert "images" in seeing.info.serves
    many = [say("user", *[RED, BLUE, WIDE, paint("grey")] * 5, "How many?")]
    asked = [ONE, OTHER, HISTORY, NONE, many]
    due = [reference.ask(messages, TOKENS) for messages in asked]
    for messages, (ids, answer) in zip(asked, due, strict=True):
        assert seeing.answer(messages) == answer
        assert messages is NONE or encode(seeing, messages) == ids
    jobs = [seeing.ask(messages) for messages in asked * 2]
    assert [seeing.tokens(job) for job in jobs] == [answer for _, answer in due] * 2


@pytest.mark.parametrize("done", [1, TOKENS - 1])
def test_another_worker_goes_on(seeing: Seeing, reference: Reference, done: int) -> None:
    _, due = reference.ask(HISTORY, TOKENS)
    assert seeing.answer(HISTORY, emitted=due[:done]) == due[done:]


def test_the_prefix_cache_knows_pictures(seeing: Seeing, reference: Reference) -> None:
    """Prompts of the same tokens differ if their pictures do."""
    red, blue = ([say("user", paint(colour), LONG)] for colour in ("red", "blue"))
    assert encode(seeing, red) == encode(seeing, blue)
    jobs = [seeing.ask(red), seeing.ask(blue), seeing.ask(red), seeing.ask(blue)]
    cached = []
    for job, messages in zip(jobs, [red, blue, red, blue], strict=True):
        assert seeing.tokens(job) == reference.ask(messages, TOKENS)[1]
    for messages in (red, blue, [say("user", paint("grey"), LONG)]):
        job = seeing.ask(messages)
        seeing.tokens(job)
        cached.append(max(output.cached_tokens for output in seeing.outputs[job]))
    assert cached[0] == cached[1] > 0 == cached[2]


def test_the_token_of_an_image_is_no_image(seeing: Seeing) -> None:
    """A text may name it, and a model may write it."""
    ids = encode(seeing, ONE)
    mark = max(set(ids), key=ids.count)
    assert len(seeing.answer(ONE, emitted=[mark, mark])) == TOKENS - 2
    named = "".join(seeing.engine._media._marks["images"])
    assert len(seeing.answer([say("user", f"What is {named}?")])) == TOKENS
    with pytest.raises(RequestError, match="stands for an image in this model's prompts"):
        seeing.ask([say("user", named, RED)])


def test_an_adapter_reads_images(
    seeing: Seeing, folder: Path, reference: Reference, tmp_path: Path
) -> None:
    """With and without it, in one batch, while it takes the only slot of adapters."""
    tuned = Reference(folder)
    targets = r".*(language_model|text_model).*\.(q_proj|v_proj)"
    torch.manual_seed(3)
    config = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    tuned.model = peft.get_peft_model(tuned.model, config)
    tuned.model.save_pretrained(str(tmp_path))
    seeing.engine.load_adapter(AdapterSpec("tuned", str(tmp_path)))
    asked = [ONE, HISTORY]
    jobs = [seeing.ask(messages, adapter=name) for messages in asked for name in ("tuned", "")]
    answers = [seeing.tokens(job) for job in jobs]
    assert answers[::2] == [tuned.ask(messages, TOKENS)[1] for messages in asked]
    assert answers[1::2] == [reference.ask(messages, TOKENS)[1] for messages in asked]
    assert answers[0] != answers[1]


def test_a_grammar_is_kept(seeing: Seeing) -> None:
    grammar = Grammar("regex", "(red|blue) [0-9]{3}", "guided_regex")
    job = seeing.ask(ONE, grammar=grammar, ignore_eos=False)
    assert re.fullmatch("(red|blue) [0-9]{3}", seeing.text(job))


def test_scores_of_a_prompt(seeing: Seeing) -> None:
    job = seeing.ask(ONE, logprobs=2, prompt_logprobs=1, max_tokens=5)
    assert len(seeing.logprobs(job)) == 5
    told = seeing.outputs[job][0].prompt
    assert told is not None and [one.id for one in told] == encode(seeing, ONE)


def test_what_is_refused(seeing: Seeing) -> None:
    beside = seeing.ask(NONE, max_tokens=100)
    for data in (RED.data[:60], RED.data[:100] + b"\0" * 40):
        with pytest.raises(RequestError, match="image 2 cannot be decoded"):
            seeing.ask([say("user", BLUE, Media(data, RED.kind), "?")])
    over = seeing.engine.encode_media([say("user", RED, LONG * 40)], (), {}, False)
    assert len(over.ids) > seeing.info.max_context and not over.inputs
    assert len(seeing.tokens(beside)) == 100
    assert seeing.engine.fatal is None
