"""Log probabilities and biases: the library's own numbers, whoever shares the batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from servekit.engines.api.base import Job
from servekit.engines.text.sampling_params import LEAST, Sampling
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.sampling import Report
from servekit.errors import RequestError
from servekit.protocol.messages import Grammar, SamplingParams
from tests.unit.engines.harness import PROMPTS, Harness, assert_alive

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 42, "min_p": 0.01}


def scored(folder: Path, prompt: str, tokens: list[int]) -> torch.Tensor:
    """Log probabilities by the library, float32 [tokens, vocabulary]."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    whole: torch.Tensor = logits.float().log_softmax(-1)
    return whole


@pytest.mark.parametrize(
    "params",
    [
        {},
        SAMPLED,
        SAMPLED | {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "min_tokens": 3},
        {"logit_bias": ((60, 100.0),)},
        {"grammar": Grammar("regex", "[0-9]{3}")},
    ],
    ids=["greedy", "sampled", "penalised", "biased", "bound"],
)
def test_they_are_the_models_own_before_anything_else(
    either: Harness, tiny_model: Path, params: dict[str, Any]
) -> None:
    job = either.submit(PROMPTS[0], max_tokens=12, logprobs=3, **params)
    crowd = either.submit(PROMPTS[1], max_tokens=12, logprobs=0, **SAMPLED)
    either.submit(PROMPTS[2], max_tokens=12)
    tokens, noted = either.tokens(job), either.logprobs(job)
    expected = scored(tiny_model, PROMPTS[0], tokens)
    assert len(noted) == len(tokens)
    piece = either.engine._pieces.find_bytes
    for token, one, logs in zip(tokens, noted, expected, strict=True):
        assert one.token == piece(token)
        assert one.logprob == pytest.approx(float(logs[token]), abs=1e-3)
        values, ids = logs.topk(3)
        assert [text for text, _ in one.best] == [piece(int(i)) for i in ids]
        assert [value for _, value in one.best] == pytest.approx(values.tolist(), abs=1e-3)
    assert all(one.best == () for one in either.logprobs(crowd))
    assert len(either.logprobs(crowd)) == len(either.tokens(crowd))


def test_who_does_not_ask_gets_none(either: Harness) -> None:
    job = either.submit(PROMPTS[0], max_tokens=5, **SAMPLED)
    assert either.logprobs(job) == []


def test_asking_changes_no_text(either: Harness) -> None:
    for params in ({}, SAMPLED):
        plain = either.generate(PROMPTS[0], max_tokens=20, ignore_eos=True, **params)
        assert plain == either.generate(
            PROMPTS[0], max_tokens=20, ignore_eos=True, logprobs=20, **params
        )


def test_what_is_impossible_is_a_number_all_the_same() -> None:
    job = Job(1, [1], SamplingParams())
    row = Row("k", job, Sampling(temperature=0.0, logprobs=3), frozenset(), 10)
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    report = Report([row], logits)
    logits[0, 1] = torch.inf  # a bias, say, has it chosen
    report.record_logits(logits)
    assert row.scores is not None
    assert row.scores.chosen == LEAST
    assert row.scores.best[0] == (0, 0.0)
    assert all(math.isfinite(value) for _, value in row.scores.best)


# ---------------------------------------------------------------- biases


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_bias_bans_and_forces(either: Harness, params: dict[str, Any]) -> None:
    asked = {"max_tokens": 10, "ignore_eos": True} | params
    plain = either.generate(PROMPTS[0], **asked)
    banned = tuple((token, -100.0) for token in set(plain))
    assert not set(either.generate(PROMPTS[0], logit_bias=banned, **asked)) & set(plain)
    assert either.generate(PROMPTS[0], logit_bias=((77, 100.0),), **asked) == [77] * 10


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_bias_is_the_same_alone_in_a_crowd_and_continued(
    either: Harness, params: dict[str, Any]
) -> None:
    bias = tuple((token, 4.0 if token % 2 else -4.0) for token in range(3, 300))
    asked: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "logit_bias": bias} | params
    alone = [either.generate(prompt, **asked) for prompt in PROMPTS]
    crowd = [either.submit(prompt, **asked) for prompt in PROMPTS]
    either.submit(PROMPTS[0], max_tokens=16)
    assert [either.tokens(job) for job in crowd] == alone
    for cut in (1, 8, 15):
        rest = either.submit(PROMPTS[0], alone[0][:cut], **asked)
        assert either.tokens(rest) == alone[0][cut:]


def test_a_bias_is_added_before_the_temperature(tiny: Harness, tiny_model: Path) -> None:
    """Just enough to overtake, and a little less than that."""
    logs = scored(tiny_model, PROMPTS[0], [5])[0]
    (first, second), ids = logs.topk(2)
    gap = float(first - second)
    for extra, chosen in ((0.01, ids[1]), (-0.01, ids[0])):
        bias = ((int(ids[1]), gap + extra),)
        for params in ({"temperature": 0.0}, {"temperature": 5.0, "top_k": 1, "seed": 1}):
            asked: dict[str, Any] = {"max_tokens": 1, "logit_bias": bias} | params
            assert tiny.generate(PROMPTS[0], **asked) == [int(chosen)]


@pytest.mark.parametrize("entry", [(-1, 1.0), (10**6, 1.0), (5, 1e9), (5, math.nan)])
def test_an_absurd_bias_is_refused(either: Harness, entry: tuple[int, float]) -> None:
    with pytest.raises(RequestError) as caught:
        either.submit(PROMPTS[0], logit_bias=((3, 1.0), entry))
    assert caught.value.param == "logit_bias"
    assert_alive(either)
