"""One request at a time: its prompt in pieces or whole, its turns, and its end at any step."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from servekit.engines.api.base import Job
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.sequential import StaticRunner
from servekit.protocol.messages import SamplingParams

PROMPT = list(range(1, 11))


@pytest.fixture
def runner() -> StaticRunner:
    """A tiny model with random weights, which reads 4 tokens at once."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model: Any = LlamaForCausalLM(config)
    return StaticRunner(model.eval(), capacity=40, chunk=4)


def make_row(prompt: list[int] | None = None, max_tokens: int = 3, **params: Any) -> Row:
    job = Job(1, PROMPT if prompt is None else prompt, SamplingParams(**params))
    return Row("k", job, Sampling(0.0), frozenset(), max_tokens)


def steps(runner: StaticRunner) -> list[list[int]]:
    """The tokens of each step until nothing runs."""
    found = []
    while runner.running or runner.waiting:
        found.append([token for _, output in runner.step() for token in output.token_ids])
    return found


def test_a_prompt_is_read_in_pieces_and_a_step_has_a_token(runner: StaticRunner) -> None:
    runner.add(make_row())
    assert [len(one) for one in steps(runner)] == [0, 0, 1, 1, 1]


def test_a_recurrent_model_reads_its_prompt_whole(runner: StaticRunner) -> None:
    runner.add(make_row())
    expected = [one for one in steps(runner) if one]
    runner._model._is_stateful = True
    runner.add(make_row())
    assert steps(runner) == expected


def test_pieces_and_the_whole_have_the_librarys_tokens(runner: StaticRunner) -> None:
    ids = torch.tensor([PROMPT])
    told = runner._model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=-1)
    runner.add(make_row())
    assert list(chain(*steps(runner))) == told[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Phi3", {}),  # names `logits_to_keep` when it prepares a step
        # counts positions in the cache of its first layer, where there are none
        ("MiniMax", {"layer_types": ["linear_attention", "full_attention"]}),
        # returns no cache: what it reads is kept in the one that it is given
        ("RecurrentGemma", {"num_hidden_layers": 3, "head_dim": 8, "w_init_variance_scale": 20.0}),
    ],
)
def test_models_with_ways_of_their_own_say_what_generate_says(
    name: str, fields: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.4}
    config = getattr(transformers, f"{name}Config")
    own = config(vocab_size=32, pad_token_id=0, **(sizes | heads | fields))
    model = getattr(transformers, f"{name}ForCausalLM")(own).eval()
    ids = torch.tensor([PROMPT])
    told = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=-1)
    runner = StaticRunner(model, capacity=40, chunk=4)
    runner.add(make_row(max_tokens=6))
    assert list(chain(*steps(runner))) == told[0, len(PROMPT) :].tolist()


def test_rows_have_their_turns_one_after_another(runner: StaticRunner) -> None:
    first, second = make_row(), make_row([5, 6], max_tokens=2)
    runner.add(first)
    runner.add(second)
    ended = []
    while runner.running or runner.waiting:
        assert runner.running <= 1
        ended += [row for row, output in runner.step() if output.finish]
    assert ended == [first, second]
    assert [len(row.completion) for row in ended] == [3, 2]


def test_the_cache_is_as_full_as_the_row_is_long(runner: StaticRunner) -> None:
    assert (runner.kv_used, runner.running) == (0.0, 0)
    row = make_row()
    runner.add(row)
    runner.step()
    assert (runner.kv_used, runner.running) == (10 / 40, 1)
    runner.capacity = 5
    assert runner.kv_used == 1.0
    runner.cancel(row)
    assert (runner.kv_used, runner.running) == (0.0, 0)


def test_a_cancelled_row_leaves_nothing_to_the_next(runner: StaticRunner) -> None:
    runner.add(make_row([5, 6]))
    expected = steps(runner)
    running, waiting, kept = make_row(), make_row([7]), make_row([5, 6])
    for row in (running, waiting, kept):
        runner.add(row)
    runner.step()
    runner.cancel(running)
    runner.cancel(waiting)
    assert steps(runner) == expected


def test_logits_are_noted_and_prompts_scored_if_asked(runner: StaticRunner) -> None:
    row = make_row(prompt_logprobs=1)
    row.noted = []
    runner.add(row)
    outputs = []
    while runner.running or runner.waiting:
        outputs += [output for _, output in runner.step()]
    assert [len(one) for one in row.noted] == [32, 32, 32]
    assert outputs[0].prompt is not None and len(outputs[0].prompt) == len(PROMPT)
    assert outputs[1].prompt is None


def test_a_closed_runner_has_nothing_left(runner: StaticRunner) -> None:
    runner.add(make_row())
    runner.add(make_row())
    runner.step()
    runner.close()
    assert (runner.running, runner.waiting) == (0, 0)
