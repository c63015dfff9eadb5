"""Drawing tokens: the right distribution, and the same draws wherever they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from servekit.engines.api.base import Job
from servekit.engines.api.job_state import NOT_A_NUMBER
from servekit.engines.text.sampling_params import CANDIDATES, Sampling, resolve_sampling
from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.sampling import (
    Sampler,
    _gumbel_noise,
    best_tokens,
    draw_tokens,
)
from servekit.protocol.messages import SamplingParams


def draws(logits: Tensor, sampling: Sampling, count: int) -> Tensor:
    """How often each token is drawn at `count` positions."""
    tokens = draw_tokens(logits.expand(count, -1).clone(), [sampling] * count, list(range(count)))
    return torch.bincount(tokens, minlength=logits.shape[-1]).double()


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    usual = expected >= 5  # where the statistic is meaningful
    return float(((counts[usual] - expected[usual]) ** 2 / expected[usual]).sum())


def row(sampling: Sampling, prompt: list[int], emitted: list[int], eos: frozenset[int]) -> Row:
    return Row("k", Job(1, prompt, SamplingParams(), emitted), sampling, eos, 100)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1])
def test_draws_follow_the_softmax(seed: int) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(3)) * 1.5
    counts = draws(logits, Sampling(seed=seed), 40_000)
    # 59 degrees of freedom: mean 59, standard deviation 11; 120 is met once in a million.
    assert chi_square(counts, logits.softmax(-1)) < 120


def test_draws_across_seeds_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    samplings = [Sampling(seed=seed) for seed in range(20_000)]
    tokens = draw_tokens(logits.expand(20_000, -1).clone(), samplings, [0] * 20_000)
    counts = torch.bincount(tokens, minlength=4).double()
    assert chi_square(counts, logits.softmax(-1)) < 30


def test_neighbouring_positions_are_independent() -> None:
    count = 20_000
    tokens = draw_tokens(torch.zeros(count, 4), [Sampling(seed=7)] * count, list(range(count)))
    pairs = torch.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16).double()
    assert chi_square(pairs, torch.full((16,), 1 / 16)) < 50


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([3.0, 1.0, 0.0])
    counts = draws(logits, Sampling(temperature=2.0, seed=1), 30_000)
    assert chi_square(counts, (logits / 2).softmax(-1)) < 25


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=3, seed=1), 3),
        (Sampling(top_p=0.5, seed=1), None),
        (Sampling(top_k=5, top_p=0.8, seed=1), None),
        (Sampling(top_k=1, seed=1), 1),
        (Sampling(min_p=0.2, seed=1), None),
        (Sampling(top_k=30, min_p=0.3, seed=1), None),
        (Sampling(top_p=0.9, min_p=0.1, temperature=0.7, seed=1), None),
    ],
)
def test_filters_draw_from_what_they_keep_and_nothing_else(
    sampling: Sampling, kept: int | None
) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    expected = filtered(logits, sampling)
    counts = draws(logits, sampling, 20_000)
    assert kept is None or int((expected > 0).sum()) == kept
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected) < 90


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """The same filters written plainly: full sort, one at a time, as transformers does it."""
    probabilities = (logits.double() / sampling.temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    if sampling.top_k:
        probabilities[order[sampling.top_k :]] = 0
        probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= sampling.top_p]] = 0
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def test_top_p_that_reaches_beyond_the_candidates_is_exact() -> None:
    size = 4 * CANDIDATES
    logits = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 0.1
    sampling = Sampling(top_p=0.9, seed=2)
    expected = filtered(logits, sampling)
    counts = draws(logits, sampling, 10_000)
    assert int((expected > 0).sum()) > CANDIDATES
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected) < size + 6 * (2 * size) ** 0.5


@pytest.mark.lane("long")
@pytest.mark.parametrize("top_k", [CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 2 * CANDIDATES])
def test_top_k_around_the_number_of_candidates(top_k: int) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 0.5
    sampling = Sampling(top_k=top_k, top_p=0.97, seed=2)
    expected = filtered(logits, sampling)
    counts = draws(logits, sampling, 20_000)
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected) < 1000


def test_a_row_draws_the_same_alone_and_in_any_company() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(6, 1000, generator=generator) * 2
    samplings = [
        Sampling(seed=1),
        Sampling(seed=1, top_p=0.9),
        Sampling(seed=2, top_k=40, temperature=0.7),
        Sampling(seed=3, min_p=0.1),
        Sampling(seed=4, top_p=0.99, temperature=5.0),  # reaches beyond the candidates
        Sampling(seed=5),
    ]
    positions = [0, 5, 9, 2, 7, 1000]
    together = draw_tokens(logits.clone(), samplings, positions)
    for index, sampling in enumerate(samplings):
        alone = draw_tokens(logits[index : index + 1].clone(), [sampling], [positions[index]])
        assert alone.item() == together[index].item()


def test_the_same_noise_whether_or_not_a_filter_is_on() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(2)) * 6
    for position in range(200):
        plain = draw_tokens(logits.clone(), [Sampling(seed=8)], [position])
        ranked = draw_tokens(logits.clone(), [Sampling(seed=8, top_p=0.999999)], [position])
        assert plain.item() == ranked.item()


def test_noise_is_finite_and_in_chunks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.tensor([[0, 0], [0xFFFFFFFF, 0xFFFFFFFF], [1, 2]])
    noise = _gumbel_noise(torch.arange(200_000).unsqueeze(0), keys)
    assert noise.isfinite().all()
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(2))
    whole = draw_tokens(logits.clone(), [Sampling(seed=1)] * 8, list(range(8)))
    monkeypatch.setattr("servekit.engines.transformers.sampling._NOISE_CHUNK", 700)
    assert draw_tokens(logits.clone(), [Sampling(seed=1)] * 8, list(range(8))).equal(whole)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0])
def test_extreme_temperatures_draw_a_token(temperature: float) -> None:
    logits = torch.tensor([[50.0, -50.0, 10.0, 49.0]])
    for sampling in (Sampling(temperature, seed=1), Sampling(temperature, seed=1, top_p=0.5)):
        token = draw_tokens(logits.clone(), [sampling], [0]).item()
        assert 0 <= token < 4
        assert temperature > 1 or token == 0


@pytest.mark.parametrize("how", [{}, {"min_p": 0.5}, {"top_k": 3}, {"top_p": 0.9, "min_p": 0.1}])
def test_a_draw_hides_no_nan(how: dict[str, Any]) -> None:
    """A single logit is, if the head's weights of one token are."""
    logits = torch.randn(2, 50)
    logits[1, 7] = torch.nan
    rows = [row(Sampling(seed=5, **how), [1], [], frozenset()) for _ in range(2)]
    Sampler().apply(rows, logits)
    tokens = best_tokens(logits).tolist()
    assert tokens[0] != NOT_A_NUMBER
    assert tokens[1] == NOT_A_NUMBER


def test_greedy_rows_are_not_touched() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    greedy = row(Sampling(temperature=0.0), [1], [], frozenset())
    sampled = row(Sampling(seed=1), [1], [], frozenset())
    Sampler().apply([greedy, sampled], logits)
    assert logits[0].equal(before[0])
    assert int(logits[1].argmax()) == int(draw_tokens(before[1:], [sampled.sampling], [0]))


def test_penalties_count_the_completion_and_repetition_counts_all() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, -2.0, 2.0]])
    sampling = Sampling(
        temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0
    )
    one = row(sampling, [0, 3], [1, 1, 2], frozenset())
    Sampler().apply([one], logits)
    # token 0: prompt only; 1: twice said; 2: once; 3: prompt only, negative; 4: never seen
    assert logits.tolist() == [[1.0, 1.0 - 0.5 - 0.5, 1.0 - 0.5 - 0.25, -4.0, 2.0]]


def test_a_repeated_token_is_penalised_with_its_bias() -> None:
    """As in transformers' generate, vLLM and llama.cpp."""
    logits = torch.tensor([[1.0, 3.0]])
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=((0, 3.0),))
    Sampler().apply([row(sampling, [0], [], frozenset())], logits)
    assert logits.tolist() == [[2.0, 3.0]]


def test_penalties_follow_new_tokens() -> None:
    one = row(Sampling(temperature=0.0, frequency_penalty=1.0), [0], [], frozenset())
    for expected in ([3.0, 1.0], [2.0, 1.0], [1.0, 1.0]):
        logits = torch.tensor([[3.0, 1.0]])
        Sampler().apply([one], logits)
        assert logits.tolist() == [expected]
        one.push(0)


def test_min_tokens_forbids_the_end_until_then() -> None:
    one = row(Sampling(temperature=0.0, min_tokens=2), [0], [], frozenset({1, 2}))
    for forbidden in (True, True, False):
        logits = torch.tensor([[0.0, 5.0, 4.0]])
        Sampler().apply([one], logits)
        assert int(logits.argmax()) == (0 if forbidden else 1)
        one.push(0)


def test_resolve_prefers_the_request_then_the_model_then_openai() -> None:
    model = {"temperature": 0.6, "top_k": 50, "top_p": None}
    asked = resolve_sampling(SamplingParams(temperature=0.2, seed=9), model, 1000)
    assert (asked.temperature, asked.top_k, asked.top_p, asked.seed) == (0.2, 50, 1.0, 9)
    bare = resolve_sampling(SamplingParams(), {}, 1000)
    assert (bare.temperature, bare.top_k, bare.top_p, bare.min_p) == (1.0, 0, 1.0, 0.0)
    assert resolve_sampling(SamplingParams(top_k=0), model, 1000).top_k == 0


def test_resolve_turns_off_a_top_k_above_the_vocabulary() -> None:
    assert resolve_sampling(SamplingParams(top_k=10**12), {}, 1000).top_k == 0
    assert resolve_sampling(SamplingParams(), {"top_k": 1000}, 1000).top_k == 0


def test_unseeded_requests_get_seeds_of_their_own() -> None:
    assert len({resolve_sampling(SamplingParams(), {}, 10).seed for _ in range(100)}) == 100
