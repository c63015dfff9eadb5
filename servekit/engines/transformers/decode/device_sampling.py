"""Choice of tokens on the device for all slots, without waiting, equal to `sampling`'s.

The arithmetic of a draw is the same, but its parameters are on the device. Rows that this cannot
serve need the host: those whose logits depend on the host's state (penalties, biases, grammars),
those that report more than the token, and those whose top-p may reach beyond the candidates.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from servekit.engines.text.sampling_params import CANDIDATES
from servekit.engines.transformers import sampling
from servekit.engines.transformers.decode import batch_slots
from servekit.engines.transformers.request_row import Row

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK32 = 0xFFFFFFFF


class SamplingMode(NamedTuple):
    """The needs of a step besides greedy tokens; with `free` it chooses no tokens."""

    plain: bool = False
    ranked: bool = False
    free: bool = False


FREE = SamplingMode(free=True)
#: The modes in which the device chooses the tokens, and all modes.
CHOOSING = (
    SamplingMode(),
    SamplingMode(plain=True),
    SamplingMode(ranked=True),
    SamplingMode(plain=True, ranked=True),
)
MODES = (*CHOOSING, FREE)


def needs_host(row: Row, vocab_size: int) -> bool:
    """Return whether `sampling` must choose the row's tokens, with the host involved."""
    if row.steered or row.wants_logprobs or row.noted is not None or row.constraint is not None:
        return True
    how = row.sampling
    bounded = 0 < how.top_k <= CANDIDATES or vocab_size <= CANDIDATES
    return not how.greedy and how.ranked and not bounded


def find_mode(kinds: Collection[int]) -> SamplingMode:
    """Return the mode of a step with rows of these kinds."""
    return SamplingMode(plain=batch_slots.PLAIN in kinds, ranked=batch_slots.RANKED in kinds)


def classify_row(row: Row) -> int:
    """Return GREEDY, PLAIN or RANKED."""
    if row.sampling.greedy:
        return batch_slots.GREEDY
    return batch_slots.RANKED if row.sampling.ranked else batch_slots.PLAIN


def choose_tokens(logits: Tensor, ints: Tensor, floats: Tensor, mode: SamplingMode) -> Tensor:
    """Return a token per slot, [slots] int64; see `sampling.best_tokens` for NaN logits.

    `logits` [slots, vocabulary] float32 are not changed.
    """
    tokens = sampling.best_tokens(logits)
    if not (mode.plain or mode.ranked):
        return tokens
    warm = logits / floats[:, batch_slots.TEMPERATURE, None]
    keys = noise_keys(ints[:, batch_slots.NOISE], ints[:, batch_slots.COUNT])
    floor, kind = floats[:, batch_slots.FLOOR, None], ints[:, batch_slots.KIND]
    if mode.ranked:
        width = min(CANDIDATES, logits.shape[1])
        limit, top_p = ints[:, batch_slots.LIMIT, None], floats[:, batch_slots.TOP_P, None]
        drawn, _ = sampling.draw_among(warm, keys, sampling.Bounds(limit, top_p, floor), width)
        tokens = torch.where((kind == batch_slots.RANKED) & (tokens >= 0), drawn, tokens)
    if mode.plain:
        warm.masked_fill_(warm < warm.amax(-1, keepdim=True) + floor, -torch.inf)
        drawn = sampling.draw_loudest(warm, keys)
        tokens = torch.where((kind == batch_slots.PLAIN) & (tokens >= 0), drawn, tokens)
    return tokens


def noise_keys(base: Tensor, position: Tensor) -> Tensor:
    """Return the slots' `noise_keys` (see `sampling_params`), [slots, 2]; int64 wraps as needed."""
    mixed = base + position + _to_signed(_GAMMA)
    mixed = (mixed ^ _shift_right(mixed, 30)) * _to_signed(_FIRST)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _to_signed(_SECOND)
    mixed = mixed ^ _shift_right(mixed, 31)
    return torch.stack([mixed & _MASK32, _shift_right(mixed, 32)], 1)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
