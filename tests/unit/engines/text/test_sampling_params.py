"""The sampling of a request: its own values, the model's, OpenAI's; and its noise."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.engines.text.sampling_params import (
    COLDEST,
    Sampling,
    noise_base,
    noise_keys,
    resolve_sampling,
)
from servekit.protocol.messages import SamplingParams


def resolve(defaults: dict[str, Any] | None = None, **params: Any) -> Sampling:
    return resolve_sampling(SamplingParams(**params), defaults or {}, vocab_size=100)


def test_what_is_left_out_is_the_models_then_openais() -> None:
    model = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    found = resolve(model, top_p=0.5)
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.5)
    assert (found.min_p, found.repetition_penalty) == (0.1, 1.1)
    plain = resolve()
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p) == (1.0, 0, 1.0, 0.0)
    assert plain.repetition_penalty == 1.0


def test_a_zero_of_the_request_is_no_omission() -> None:
    found = resolve({"temperature": 0.6, "top_k": 20, "min_p": 0.1}, temperature=0.0, top_k=0)
    assert (found.temperature, found.top_k, found.min_p) == (0.0, 0, 0.1)
    assert found.greedy


def test_other_values_are_the_requests() -> None:
    found = resolve(
        presence_penalty=0.1,
        frequency_penalty=0.2,
        min_tokens=3,
        logit_bias=((1, 2.0),),
        logprobs=4,
        seed=5,
    )
    assert (found.presence_penalty, found.frequency_penalty, found.min_tokens) == (0.1, 0.2, 3)
    assert (found.logit_bias, found.logprobs, found.seed) == (((1, 2.0),), 4, 5)


@pytest.mark.parametrize(("top_k", "kept"), [(99, 99), (100, 0), (1000, 0)])
def test_a_top_k_that_keeps_all_is_off(top_k: int, kept: int) -> None:
    assert resolve(top_k=top_k).top_k == kept


def test_requests_without_a_seed_differ() -> None:
    seeds = {resolve().seed for _ in range(20)}
    assert len(seeds) == 20 and all(0 <= seed < 2**63 for seed in seeds)
    assert resolve(seed=0).seed == 0


def test_what_a_sampling_needs() -> None:
    assert Sampling(0.0).greedy and Sampling(COLDEST / 2).greedy and not Sampling(COLDEST).greedy
    assert not Sampling().penalised
    assert Sampling(presence_penalty=0.1).penalised
    assert Sampling(frequency_penalty=-0.1).penalised
    assert Sampling(repetition_penalty=0.9).penalised
    assert not Sampling().ranked
    assert (
        Sampling(top_k=1).ranked and Sampling(top_p=0.9).ranked and not Sampling(min_p=0.5).ranked
    )


def test_noise_is_that_of_seed_and_position_alone() -> None:
    assert noise_keys(7, 0) == noise_keys(7, 0)
    keys = {noise_keys(seed, at) for seed in (0, 7, -1, 2**63) for at in range(50)}
    assert len(keys) == 200
    assert all(0 <= key < 2**32 for pair in keys for key in pair)
    assert noise_keys(0, 0) == (1293516399, 2802244911), "as in releases before"


def test_the_base_of_a_seeds_noise_is_what_positions_are_added_to() -> None:
    assert noise_base(0) % 2**64 == 0xE220A8397B1DCDAF  # splitmix64's first number from 0
    for seed in (0, 7, 12345, -1):
        base = noise_base(seed)
        assert -(2**63) <= base < 2**63
        mixed = [noise_keys(seed, at) for at in (1, 2)]
        assert mixed[0] != mixed[1]
    assert {noise_base(seed) < 0 for seed in range(20)} == {True, False}
