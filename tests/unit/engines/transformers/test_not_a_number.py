"""A request whose logits are NaN fails alone, and leaves nothing behind that harms another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from servekit.engines.api.job_state import NOT_A_NUMBER
from servekit.engines.transformers.decode import batch_slots, device_sampling
from servekit.engines.transformers.decode.device_sampling import SamplingMode
from tests.unit.engines.harness import Harness, reference

Make = Callable[..., Harness]
#: A token whose embedding is NaN: whoever reads it computes NaN from there on.
POISON = 392
PROMPTS = ["The quick brown fox", "jumps over the lazy dog. " * 4, "def f(x): return"]


@pytest.fixture
def poisoned(tiny_model: Path, tmp_path: Path) -> Path:
    library: Any = AutoModelForCausalLM  # untyped
    model = library.from_pretrained(tiny_model, dtype=torch.float32)
    folder = tmp_path / "model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    model.save_pretrained(folder)
    return folder


WAYS: dict[str, dict[str, Any]] = {
    "by request": {},
    "decoding by itself": {"decode": "graph"},
    "over the whole batch": {"attention": "sdpa"},
    "by the model's own attention": {"attention": "eager"},
    "one at a time": {"batching": "static"},
}


@pytest.mark.lane("long")
@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0, "seed": 3}, {"logprobs": 2}])
@pytest.mark.parametrize("way", WAYS)
def test_it_fails_alone(
    harness: Make, tiny_model: Path, poisoned: Path, way: str, asked: dict[str, Any]
) -> None:
    few = {"kv_cache_bytes": 6 * 2**16, "slots": 4, "max_batch_tokens": 32}  # pages come again soon
    one = harness(poisoned, options=WAYS[way] | few)
    expected = reference(tiny_model, PROMPTS, 12)
    assert not any(POISON in text for text in expected)
    for _ in range(3):
        beside = [one.submit(prompt, max_tokens=12, ignore_eos=True) for prompt in PROMPTS]
        ids = [(7919 * at) % 390 for at in range(40)]
        bad = one.submit([*ids, POISON, *ids], max_tokens=8, ignore_eos=True, **asked)
        one.until(lambda bad=bad: one.ended(bad), "the bad one ends")  # type: ignore[misc]
        [only] = one.outputs[bad]
        assert only.error is not None and "not numbers (NaN)" in only.error
        assert only.token_ids == [] and only.param is None
        assert [one.tokens(job) for job in beside] == expected
    one.until_idle()
    assert one.engine._runner.running == 0


@pytest.mark.lane("long")
@pytest.mark.parametrize("way", ["by request", "decoding by itself", "over the whole batch"])
def test_nobody_finds_its_prefix_in_the_cache(harness: Make, poisoned: Path, way: str) -> None:
    """Tokens before the poison attend to it, too, with weight 0: their keys are NaN."""
    wide = {"max_batch_tokens": 64}
    ids = [(7919 * at) % 390 for at in range(40)]
    alone = harness(poisoned, options=WAYS[way] | wide)
    expected = alone.generate([*ids[:33], 6], max_tokens=6, ignore_eos=True)
    one = harness(poisoned, options=WAYS[way] | wide)
    for _ in range(2):
        bad = one.submit([*ids, POISON, *ids], ignore_eos=True)
        one.until(lambda bad=bad: one.ended(bad), "the bad one ends")  # type: ignore[misc]
        assert one.outputs[bad][0].error
        assert one.generate([*ids[:33], 6], max_tokens=6, ignore_eos=True) == expected
    again = one.submit([*ids[:33], 6], max_tokens=6, ignore_eos=True)
    assert one.tokens(again) == expected
    assert one.outputs[again][0].cached_tokens == 32  # what came after it is shared


@pytest.mark.lane("long")
@pytest.mark.parametrize("more", [{"logprobs": 2}, {"prompt_logprobs": 1}, {"temperature": 1.0}])
def test_what_others_lost_is_not_seen(
    harness: Make, tiny_model: Path, poisoned: Path, more: dict[str, Any]
) -> None:
    few = {"attention": "sdpa", "max_batch_tokens": 32}
    asked = {"max_tokens": 8, "ignore_eos": True, "seed": 7} | more
    one, clean = harness(poisoned, options=few), harness(tiny_model, options=few)
    expected = clean.submit(PROMPTS[1], **asked)
    clean.tokens(expected)
    beside = one.submit(PROMPTS[1], **asked)
    bad = [one.submit([7, POISON, 7], ignore_eos=True) for _ in range(3)]
    assert one.tokens(beside) == clean.tokens(expected)
    found, told = _scores(one, beside), _scores(clean, expected)
    assert bool(told) == ("temperature" not in more)
    assert found == pytest.approx(told, abs=1e-3)
    for job in bad:
        one.until(lambda job=job: one.ended(job), "a bad one ends")  # type: ignore[misc]
        assert one.outputs[job][0].error


def _scores(engine: Harness, job: int) -> list[float]:
    """The log probabilities that a job was told, of its prompt and its tokens."""
    outputs = engine.outputs[job]
    prompt = [one.logprob for output in outputs for one in output.prompt or []]
    chosen = [one.logprob for output in outputs for one in output.logprobs or []]
    return [value for value in (*prompt, *chosen) if value is not None]


@pytest.mark.parametrize("manner", [SamplingMode(), SamplingMode(plain=True, ranked=True)])
def test_a_step_on_the_device_says_which_rows_are_not_numbers(manner: SamplingMode) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    logits[1, 7] = torch.nan
    ints = torch.zeros(4, batch_slots.ALIVE + 1, dtype=torch.int64)
    ints[:, batch_slots.KIND] = torch.tensor(
        [batch_slots.GREEDY, batch_slots.RANKED, batch_slots.PLAIN, batch_slots.RANKED]
    )
    ints[:, batch_slots.LIMIT] = 50
    floats = torch.ones(4, 8)
    floats[:, batch_slots.FLOOR] = -torch.inf
    tokens = device_sampling.choose_tokens(logits, ints, floats, manner).tolist()
    assert tokens[1] == NOT_A_NUMBER
    assert all(0 <= token < 50 for token in (tokens[0], *tokens[2:]))
    assert tokens[0] == int(logits[0].argmax())
