"""Two ranks say what one says, whatever is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from servekit.engines.transformers.engine import TransformersEngine
from servekit.errors import LoadError, Unsupported
from servekit.protocol.adapters import AdapterSpec
from tests.unit.engines.harness import (
    PROMPTS,
    Harness,
    assert_alive,
    make_spec,
    reference,
)
from tests.unit.engines.text.test_structured_output import DIGITS, JSON

Opened = Callable[..., AbstractContextManager[Harness]]


lane = pytest.mark.lane("tensor-parallel")


@pytest.fixture(scope="module", params=["continuous", "static"])
def spread(request: pytest.FixtureRequest, even: Path, two_ranks: Opened) -> Iterator[Harness]:
    with two_ranks(even, options={"batching": request.param}) as engine:
        yield engine


@lane
def test_greedy_in_a_crowd_is_what_generate_says(spread: Harness, even: Path) -> None:
    expected = reference(even, PROMPTS, 24)
    jobs = []
    for seed, prompt in enumerate(PROMPTS):
        jobs.append(spread.submit(prompt, max_tokens=24, ignore_eos=True))
        spread.submit(prompt, temperature=1.0, top_p=0.9, seed=seed, presence_penalty=1.0)
    assert [spread.tokens(job) for job in jobs] == expected


@lane
def test_it_says_how_it_is_spread(spread: Harness) -> None:
    info = spread.info
    assert info.detail.endswith("tensor parallel, 2 ranks")
    assert "adapters" not in info.serves
    assert info.sleeps


@lane
def test_seeds_grammars_and_log_probabilities_are_as_on_one(
    spread: Harness, alone: Harness
) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_k": 30, "seed": 5, "max_tokens": 12},
        {"grammar": JSON, "max_tokens": 60, "logprobs": 3},
        {"grammar": DIGITS, "temperature": 1.0, "seed": 3},
        {"logit_bias": ((77, 5.0), (60, -100.0)), "max_tokens": 12, "logprobs": 5},
    ]
    jobs = [spread.submit(PROMPTS[0], **params) for params in asked]
    for job, params in zip(jobs, asked, strict=True):
        here = alone.submit(PROMPTS[0], **params)
        assert spread.tokens(job) == alone.tokens(here)
        found, expected = spread.logprobs(job), alone.logprobs(here)
        assert [one.logprob for one in found] == pytest.approx(
            [one.logprob for one in expected], abs=1e-3
        )


@lane
def test_another_workers_tokens_are_gone_on_from(spread: Harness) -> None:
    whole = spread.generate(PROMPTS[0], max_tokens=20, ignore_eos=True)
    rest = spread.submit(PROMPTS[0], emitted=whole[:7], max_tokens=20, ignore_eos=True)
    assert spread.tokens(rest) == whole[7:]


@lane
def test_cancelled_requests_leave_the_ranks_in_step(spread: Harness) -> None:
    jobs = [spread.submit(prompt, max_tokens=400, ignore_eos=True) for prompt in PROMPTS[:4]]
    spread.until(lambda: all(job in spread.outputs for job in jobs[:1]), "the first says something")
    for job in jobs:
        spread.engine.cancel(job)
    steps = spread.count_steps()
    spread.until_idle()
    assert_alive(spread)
    assert steps() < 200, "none of them goes on"


@lane
def test_asleep_and_awake_again_it_says_the_same(spread: Harness) -> None:
    before = spread.generate(PROMPTS[1], max_tokens=16, ignore_eos=True)
    spread.engine.sleep()
    spread.engine.wake()
    assert spread.generate(PROMPTS[1], max_tokens=16, ignore_eos=True) == before


@lane
def test_adapters_are_refused_by_a_sentence(spread: Harness) -> None:
    with pytest.raises(Unsupported, match="spread over several devices"):
        spread.engine.load_adapter(AdapterSpec("a", "/nowhere"))


def test_what_cannot_be_shared_is_refused_before_anything_starts(even: Path) -> None:
    engine = TransformersEngine(make_spec(even, gpus=3, parallel="tensor"))
    with pytest.raises(LoadError, match="4 attention heads and 2 of keys and values") as caught:
        engine.load(lambda progress: None)
    assert "parallel: device_map" in str(caught.value)
