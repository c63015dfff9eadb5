"""Tokens chosen on the device are those that the host would have drawn."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from servekit.engines.text.sampling_params import Sampling, noise_base, noise_keys
from servekit.engines.transformers import sampling
from servekit.engines.transformers.decode import device_sampling
from servekit.engines.transformers.decode.batch_slots import BatchSlots
from tests.unit.engines.transformers.decode.crowds import row

VOCABULARY = 1000
HOWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 2.0, "top_k": 256},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.7},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
]


def test_noise_keys_are_the_hosts() -> None:
    made = random.Random(0)
    seeds = [0, 1, 2**63 - 1, 2**64 - 1, *(made.getrandbits(64) for _ in range(50))]
    positions = [made.randrange(100_000) for _ in seeds]
    base = torch.tensor([noise_base(seed) for seed in seeds])
    found = device_sampling.noise_keys(base, torch.tensor(positions))
    expected = [noise_keys(seed, at) for seed, at in zip(seeds, positions, strict=True)]
    assert [tuple(pair) for pair in found.tolist()] == expected


@pytest.mark.parametrize("scale", [0.5, 6.0])
def test_draws_are_the_hosts(scale: float) -> None:
    made = torch.Generator().manual_seed(3)
    rows = [row(f"r{i}", [8] * (i + 1), 99, 17 * i, **HOWS[i % len(HOWS)]) for i in range(28)]
    for index, one in enumerate(rows):
        one.completion = [9] * (index % 5)
    seats = BatchSlots(len(rows), 4, 0, VOCABULARY, torch.device("cpu"))
    for one in rows:
        assert not device_sampling.needs_host(one, VOCABULARY)
        seats.assign(one, None, device_sampling.classify_row(one), [], 16)
    seats.upload()
    logits = scale * torch.randn(len(rows), VOCABULARY, generator=made)
    kept = logits.clone()
    found = device_sampling.choose_tokens(
        logits, seats.ints, seats.floats, device_sampling.SamplingMode(plain=True, ranked=True)
    )
    assert torch.equal(logits, kept)
    sampling.Sampler().apply(rows, logits)
    assert found.tolist() == logits.argmax(-1).tolist()
    assert len(set(found.tolist())) > 14


@pytest.mark.parametrize(
    ("how", "careful"),
    [
        ({"temperature": 0.0}, False),
        ({"temperature": 1.0, "top_p": 0.9}, True),  # it may reach deeper than the candidates
        ({"temperature": 0.0, "top_p": 0.9}, False),
        ({"temperature": 1.0, "top_k": 257}, True),
        ({"temperature": 1.0, "top_k": 256, "top_p": 0.9}, False),
        ({"temperature": 0.0, "presence_penalty": 0.1}, True),
        ({"temperature": 0.0, "logprobs": 0}, True),
        ({"temperature": 0.0, "min_tokens": 2}, True),
        ({"temperature": 0.0, "logit_bias": ((1, 1.0),)}, True),
    ],
)
def test_what_needs_the_host(how: dict[str, Any], careful: bool) -> None:
    one = row("r", [1], 9, **how)
    assert device_sampling.needs_host(one, VOCABULARY) is careful
    if "min_tokens" in how:
        one.completion = [1, 1]
        assert not device_sampling.needs_host(one, VOCABULARY)
    assert isinstance(one.sampling, Sampling)
