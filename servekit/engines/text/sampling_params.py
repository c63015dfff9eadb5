"""Sampling parameters of a request, and the keys of its noise; see `engines.transformers.sampling`.

Nothing here needs torch: engines with arithmetic of their own draw the same tokens with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from servekit.protocol.messages import SamplingParams

#: Candidates considered before the whole vocabulary is sorted.
CANDIDATES = 256
#: Below this, division by the temperature overflows float32; treated as greedy.
COLDEST = 1e-5
#: Stands for minus infinity in log probabilities, which JSON cannot encode; OpenAI's number.
LEAST = -9999.0
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one request, with defaults filled in and values in range."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def penalised(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def ranked(self) -> bool:
        """True if sampling needs the best candidates in order."""
        return self.top_k > 0 or self.top_p < 1.0


def resolve_sampling(
    params: SamplingParams, defaults: Mapping[str, Any], vocab_size: int
) -> Sampling:
    """Fill in the omitted parameters: from `defaults`, then OpenAI's (temperature 1).

    `defaults` is keyed by the fields of `Sampling`; an unseeded request gets a random seed. A top_k
    at or above the vocabulary size is turned off, because it keeps every token.
    """
    named = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    asked = {name: getattr(params, name) for name in named}
    chosen = {name: defaults.get(name) if value is None else value for name, value in asked.items()}
    sampling = Sampling(
        **{name: value for name, value in chosen.items() if value is not None},
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        min_tokens=params.min_tokens,
        logit_bias=params.logit_bias,
        logprobs=params.logprobs,
    )
    return replace(sampling, top_k=0) if sampling.top_k >= vocab_size else sampling


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Return two 32-bit keys derived from (seed, position) by two rounds of splitmix64."""
    mixed = _splitmix64(_splitmix64(seed & _MASK64) + position)
    return mixed & _MASK32, mixed >> 32


def noise_base(seed: int) -> int:
    """Return the number to which `noise_keys` adds positions, as a signed 64-bit integer."""
    mixed = _splitmix64(seed & _MASK64)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)
