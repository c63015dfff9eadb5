"""numpy's choice is torch's: the same rules, the same noise, the same token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from servekit.engines.api.base import Job
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.llamacpp.sampling_params import _gumbel_noise, choose_token, draw_token
from servekit.engines.text.sampling_params import CANDIDATES, Sampling, noise_keys
from servekit.engines.transformers.sampling import _gumbel_noise as gumbel_noise_by_torch
from servekit.engines.transformers.sampling import draw_tokens as draw_by_torch
from servekit.protocol.messages import SamplingParams

SIZE = 5000
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.3),
    Sampling(temperature=30.0),  # almost anything may win
    Sampling(min_p=0.2),
    Sampling(min_p=1.0),
    Sampling(top_p=0.9),
    Sampling(temperature=5.0, top_p=0.95),  # deeper than the candidates
    Sampling(top_k=1),
    Sampling(top_k=40, top_p=0.5, min_p=0.01),
    Sampling(temperature=2.0, top_k=CANDIDATES + 50),
    Sampling(temperature=2.0, top_k=CANDIDATES, top_p=0.999),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_both_draw_the_same_tokens(sampling: Sampling) -> None:
    random = np.random.default_rng(5)
    drawn = set()
    for position in range(60):
        logits = random.standard_normal(SIZE, dtype=np.float32) * 4
        seeded = Sampling(**{name: getattr(sampling, name) for name in sampling.__slots__})
        expected = int(draw_by_torch(torch.from_numpy(logits.copy())[None], [seeded], [position]))
        drawn.add(expected)
        assert draw_token(logits.copy(), seeded, position) == expected
    assert len(drawn) > 30


def test_the_noise_is_torchs(seed: int = 12345) -> None:
    for position in range(5):
        keys = noise_keys(seed, position)
        ids = np.arange(200_000)
        expected = gumbel_noise_by_torch(torch.from_numpy(ids)[None], torch.tensor([keys]))[
            0
        ].numpy()
        assert np.abs(_gumbel_noise(ids, keys) - expected).max() < 1e-5
        assert expected.max() < 16.7


def test_a_repeated_token_is_penalised_with_its_bias() -> None:
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias=((0, 3.0),))
    row = LlamaRow("k", Job(1, [0], SamplingParams()), sampling, frozenset(), 9)
    assert choose_token(row, np.array([1.0, 2.5], np.float32)) == 1


def test_what_is_ruled_out_is_never_drawn() -> None:
    logits = np.full(SIZE, -np.inf, np.float32)
    logits[[17, 99]] = 1.0
    for sampling in SAMPLINGS:
        drawn = {draw_token(logits.copy(), sampling, position) for position in range(40)}
        assert drawn <= {17, 99}
    assert {draw_token(logits.copy(), Sampling(), position) for position in range(40)} == {17, 99}
