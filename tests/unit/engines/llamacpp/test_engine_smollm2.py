"""A real language model in Q4_1, by llama.cpp, against the same file by transformers.

llama.cpp rounds activations to 8 bits before it multiplies them with such weights, and computes a
batch in another order than a single sequence. So texts are compared up to the first near-tie: where
they part, the two tokens were about equally good.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from servekit.protocol.messages import ChatMessage, Grammar
from tests.unit.engines.conftest import SMOLLM2, llamacpp
from tests.unit.engines.harness import Harness

pytestmark = [pytest.mark.lane("models"), pytest.mark.model]

QUESTIONS = [
    "Tell me about the sea.",
    "What is 2+2?",
    "Explain gravity to a child.",
    "List five fruits.",
    "Who was Napoleon?",
    "Name a color.",
    "Describe the moon in detail.",
    "Größe auf Englisch?",
]
#: Of log probabilities, in natural units: two tokens so close are equally good here. Each of the
#: two differs by up to 0.2 from what transformers makes of the same weights unrounded.
NEAR = 0.5


@pytest.fixture(scope="module")
def smol_gguf() -> Iterator[Harness]:
    shared = llamacpp(SMOLLM2, {"cache_type": "f16", "flash_attention": "auto"})
    yield shared
    shared.close()


def ask(harness: Harness, question: str) -> list[int]:
    ids: list[int] = harness.engine.codec.render_chat([ChatMessage("user", question)])
    return ids


def assert_same_but_for_near_ties(
    harness: Harness, prompt: list[int], one: list[int], other: list[int]
) -> None:
    if one == other:
        return
    at = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    job = harness.submit([*prompt, *one[:at]], max_tokens=1, logprobs=2)
    harness.tokens(job)
    best, second = (value for _, value in harness.logprobs(job)[0].best)
    assert best - second < NEAR, (at, one[at], other[at])


def test_alone_and_in_a_batch(smol_gguf: Harness) -> None:
    prompts = [ask(smol_gguf, question) for question in QUESTIONS]
    wanted: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True}
    alone = [smol_gguf.generate(prompt, **wanted) for prompt in prompts]
    jobs = [smol_gguf.submit(prompt, **wanted) for prompt in prompts]
    for prompt, job, one in zip(prompts, jobs, alone, strict=True):
        assert_same_but_for_near_ties(smol_gguf, prompt, one, smol_gguf.tokens(job))


def test_it_goes_on_in_another_worker(smol_gguf: Harness) -> None:
    prompt = ask(smol_gguf, QUESTIONS[6])
    whole = smol_gguf.generate(prompt, max_tokens=40)
    other = llamacpp(SMOLLM2, {"cache_type": "f16", "flash_attention": "auto"})
    try:
        for cut in (1, 5, 20, 39):
            rest = other.tokens(other.submit(prompt, whole[:cut], max_tokens=40))
            assert_same_but_for_near_ties(other, prompt, whole, whole[:cut] + rest)
    finally:
        other.close()


def test_a_schema_holds(smol_gguf: Harness) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    job = smol_gguf.submit(
        ask(smol_gguf, "Invent a person."),
        grammar=Grammar("json_schema", json.dumps(schema)),
        max_tokens=120,
    )
    assert set(json.loads(smol_gguf.text(job))) == {"name", "age"}


def test_the_model_is_the_one_that_transformers_runs(smol_gguf: Harness, smol: Harness) -> None:
    """Each one's favourite next tokens are the other's, at about the same probability."""

    def best(harness: Harness, prompt: list[int]) -> dict[bytes, float]:
        job = harness.submit(prompt, logprobs=20, max_tokens=1, ignore_eos=True)
        return dict(harness.logprobs(job)[0].best)

    for question in QUESTIONS:
        prompt: Any = ask(smol, question)
        assert prompt == ask(smol_gguf, question)
        ours, theirs = best(smol_gguf, prompt), best(smol, prompt)
        for token in list(theirs)[:3]:
            assert abs(ours[token] - theirs[token]) < 0.5, (question, token)
