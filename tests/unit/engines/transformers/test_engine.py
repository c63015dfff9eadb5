"""What the engine says: the library's own text, whoever shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servekit.protocol.messages import ChatMessage
from tests.unit.engines.harness import (
    PROMPTS,
    Harness,
    reference,
)

Make = Callable[..., Harness]


# ---------------------------------------------------------------- the text is right


def test_the_model_says_what_it_is(either: Harness) -> None:
    info = either.info
    continuous = "continuous" in info.detail
    assert (info.architecture, info.dtype, info.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert (info.max_context, info.chat) == (512, True)
    assert info.slots == (32 if continuous else 1)
    assert (info.kv_cache_bytes > 0) == continuous
    assert info.parameters > 50_000
    loads = [progress for progress in either.progress if progress.phase == "load"]
    assert loads and loads[-1].done == loads[-1].total > 0


def test_greedy_is_what_generate_says(either: Harness, tiny_model: Path) -> None:
    expected = reference(tiny_model, PROMPTS, 24)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert either.generate(prompt, max_tokens=24, ignore_eos=True) == answer


def test_greedy_is_the_same_among_sampled_neighbours(either: Harness, tiny_model: Path) -> None:
    expected = reference(tiny_model, PROMPTS, 24)
    jobs = []
    for seed, prompt in enumerate(PROMPTS):
        jobs.append(either.submit(prompt, max_tokens=24, ignore_eos=True))
        either.submit(prompt, temperature=1.5, top_p=0.9, seed=seed, frequency_penalty=0.5)
    assert [either.tokens(job) for job in jobs] == expected


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(either: Harness) -> None:
    params: dict[str, Any] = {
        "temperature": 0.9,
        "top_k": 50,
        "seed": 42,
        "max_tokens": 20,
        "ignore_eos": True,
    }
    alone = [either.generate(prompt, **params) for prompt in PROMPTS]
    crowd = [either.submit(prompt, **params) for prompt in PROMPTS]
    other = either.submit(PROMPTS[0], **params | {"seed": 43})
    assert [either.tokens(job) for job in crowd] == alone
    assert either.tokens(other) != alone[0]


def test_one_emission_per_step(either: Harness) -> None:
    before = len(either.batches)
    jobs = [either.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS[:3]]
    for job in jobs:
        either.tokens(job)
    for batch in either.batches[before:]:
        ids = [output.id for output in batch]
        assert len(set(ids)) == len(ids)
        assert all(len(output.token_ids) == 1 for output in batch)


@pytest.mark.parametrize("split", [1, 7, 23])
def test_continuing_gives_the_undisturbed_text(either: Harness, split: int) -> None:
    greedy = {"max_tokens": 24, "ignore_eos": True}
    sampled = greedy | {
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
    }
    for params in (greedy, sampled):
        whole = either.generate(PROMPTS[0], **params)
        rest = either.submit(PROMPTS[0], emitted=whole[:split], **params)
        assert either.tokens(rest) == whole[split:]
        assert either.finish(rest) == "length"


def test_continuing_what_is_already_complete_just_ends(either: Harness) -> None:
    whole = either.generate(PROMPTS[0], max_tokens=5, ignore_eos=True)
    job = either.submit(PROMPTS[0], emitted=whole, max_tokens=5)
    assert either.tokens(job) == []
    assert either.finish(job) == "length"


@pytest.mark.lane("long")
def test_the_end_of_sequence_stops_and_is_not_emitted(either: Harness) -> None:
    """Penalise everything that has been said until the end is all that is left to say."""
    job = either.submit(PROMPTS[0], max_tokens=480, temperature=1.0, seed=3, frequency_penalty=2.0)
    tokens = either.tokens(job)
    assert either.finish(job) == "stop"
    assert not set(tokens) & either.engine._eos
    longer = either.submit(
        PROMPTS[0],
        max_tokens=480,
        temperature=1.0,
        seed=3,
        frequency_penalty=2.0,
        min_tokens=len(tokens) + 5,
    )
    assert len(either.tokens(longer)) >= len(tokens) + 5
    ignoring = either.submit(
        PROMPTS[0],
        max_tokens=len(tokens) + 20,
        temperature=1.0,
        seed=3,
        frequency_penalty=2.0,
        ignore_eos=True,
    )
    assert len(either.tokens(ignoring)) == len(tokens) + 20


def test_penalties_keep_a_row_from_repeating_itself(either: Harness) -> None:
    plain = either.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    fresh = either.generate(
        PROMPTS[0], max_tokens=60, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0
    )
    assert len(set(fresh)) > len(set(plain))


def test_a_prompt_longer_than_one_batch_is_read_in_chunks(harness: Make, tiny_model: Path) -> None:
    long = "jumps over the lazy dog. " * 12
    for batching in ("continuous", "static"):
        one = harness(options={"max_batch_tokens": 16, "batching": batching})
        expected = reference(tiny_model, [long], 8)
        assert [one.generate(long, max_tokens=8, ignore_eos=True)] == expected


# ---------------------------------------------------------------- SmolLM2


@pytest.mark.lane("models")
@pytest.mark.model
def test_smollm2_greedy_is_what_generate_says_even_in_a_crowd(smol: Harness, smollm2: Path) -> None:
    prompts = ["The capital of France is", "Once upon a time", "Water boils at", "1, 2, 3, 5, 8,"]
    expected = reference(smollm2, prompts, 20)
    assert [smol.generate(prompt, max_tokens=20, ignore_eos=True) for prompt in prompts] == expected
    jobs = []
    for seed, prompt in enumerate(prompts):
        jobs.append(smol.submit(prompt, max_tokens=20, ignore_eos=True))
        smol.submit(prompt, max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
    assert [smol.tokens(job) for job in jobs] == expected


@pytest.mark.lane("models")
@pytest.mark.model
def test_smollm2_seeded_and_continued(smol: Harness) -> None:
    params: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 11,
        "max_tokens": 24,
        "ignore_eos": True,
    }
    whole = smol.generate("Once upon a time", **params)
    crowd = [smol.submit("Once upon a time", **params | {"seed": seed}) for seed in range(9, 14)]
    answers = [smol.tokens(job) for job in crowd]
    assert answers[2] == whole
    assert len({tuple(answer) for answer in answers}) == 5
    rest = smol.submit("Once upon a time", emitted=whole[:9], **params)
    assert smol.tokens(rest) == whole[9:]


@pytest.mark.model
def test_smollm2_chats(smol: Harness) -> None:
    question = ChatMessage("user", "What is the capital of France? Answer in one word.")
    job = smol.submit(smol.engine.codec.render_chat([question]), max_tokens=60)
    decoder = smol.engine.codec.decoder()
    answer = decoder.push(smol.tokens(job)) + decoder.flush()
    assert "Paris" in answer
    assert smol.finish(job) == "stop"


@pytest.mark.lane("models")
@pytest.mark.model
def test_smollm2_one_at_a_time_says_the_same(smol: Harness, harness: Make, smollm2: Path) -> None:
    static = harness(smollm2, options={"batching": "static"})
    expected = smol.generate("The capital of France is", max_tokens=16, ignore_eos=True)
    jobs = [
        static.submit("The capital of France is", max_tokens=16, ignore_eos=True) for _ in range(2)
    ]
    assert [static.tokens(job) for job in jobs] == [expected, expected]
