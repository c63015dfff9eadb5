"""Choice of tokens, with greedy and sampled rows in one batch.

A sampled token is drawn by the Gumbel-max trick: the argmax of logits plus Gumbel noise is an exact
draw from their softmax. The noise is a hash of (seed, position, token id) instead of a generator's
state, so a request draws the same tokens alone, in a batch, after a move to another worker, and on
any device (up to the last bits of the logits). `position` counts the completion tokens before the
drawn one.

Filters apply in the order of `transformers`: temperature, top-k, top-p, min-p. Top-k and top-p
consider the 256 best candidates, and sort the whole vocabulary only for rows whose mass reaches
deeper. Penalties, token biases and grammars come first, and apply to greedy rows too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from servekit.engines.api.job_state import NOT_A_NUMBER
from servekit.engines.text.sampling_params import CANDIDATES, Sampling, noise_keys
from servekit.engines.transformers.sampling.logit_masks import Masks
from servekit.engines.transformers.sampling.logprobs import Report

if TYPE_CHECKING:
    from servekit.engines.transformers.request_row import Row

#: Number of logits per batch of noise, which limits the memory used for a large batch.
_NOISE_CHUNK = 8 * 2**20
_MASK32 = 0xFFFFFFFF


def best(logits: Tensor) -> Tensor:
    """Return the best token of each row; NOT_A_NUMBER if a logit is NaN.

    `logits` is [rows, vocabulary]; the ids are [rows] int64. This does not wait for the device: the
    host learns of NaN with the token.
    """
    most, tokens = logits.max(-1)  # NaN is more than any number
    return tokens.masked_fill_(most.isnan(), NOT_A_NUMBER)


class Sampler:
    """Sampler that changes a batch's logits so that each row's argmax is its chosen token."""

    def apply(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Change `logits` [len(rows), vocabulary], float32, in place.

        Plain greedy rows are not touched and cost nothing.
        """
        masks = Masks(rows)
        report = Report(rows, logits)
        for index, row in enumerate(rows):
            if row.sampling.penalised:
                _penalise(row, logits[index])
            if row.sampling.logit_bias:
                logits[index].index_add_(0, *row.bias(logits.device))
            if row.eos_forbidden:
                logits[index, _within(row.eos, logits)] = -torch.inf
            if row.job.banned:
                logits[index, _within(row.forbidden(), logits)] = -torch.inf
        masks.apply(logits)
        self._draw(rows, logits)
        report.tell(logits)

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> None:
        drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        if drawn:
            where = torch.tensor(drawn, device=logits.device)
            tokens = draw(
                logits[where],
                [rows[index].sampling for index in drawn],
                [rows[index].position for index in drawn],
            )
            logits[where, tokens] = torch.inf


def _within(tokens: Iterable[int], logits: Tensor) -> list[int]:
    """Return the tokens that the head covers: an embedding may have more rows than its head."""
    return [token for token in tokens if token < logits.shape[-1]]


def _penalise(row: Row, logits: Tensor) -> None:
    """Lower the logits of earlier tokens.

    OpenAI's penalties count the completion, the repetition penalty the whole context.
    """
    sampling = row.sampling
    counts, seen = row.history(logits.shape[0], logits.device)
    if sampling.repetition_penalty != 1.0:
        factor = sampling.repetition_penalty
        lowered = torch.where(logits > 0, logits / factor, logits * factor)
        logits.copy_(torch.where(seen, lowered, logits))
    if sampling.frequency_penalty:
        logits.sub_(counts, alpha=sampling.frequency_penalty)
    if sampling.presence_penalty:
        logits.sub_((counts > 0).to(logits.dtype), alpha=sampling.presence_penalty)


def draw(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Draw one token per row, ids [rows]; `logits` [rows, vocabulary] are overwritten."""
    device = logits.device
    logits.div_(_column([s.temperature for s in samplings], device))
    keys = torch.tensor(
        [noise_keys(s.seed, position) for s, position in zip(samplings, positions, strict=True)],
        dtype=torch.int64,
        device=device,
    )
    ranked = [index for index, s in enumerate(samplings) if s.ranked]
    plain = [index for index, s in enumerate(samplings) if not s.ranked]
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=device)
    for chosen, draw_rows in ((plain, _draw_plain), (ranked, _draw_ranked)):
        if chosen:
            some = len(chosen) < len(samplings)
            where = torch.tensor(chosen, device=device)
            picked = [samplings[index] for index in chosen]
            tokens[where] = draw_rows(
                logits[where] if some else logits, picked, keys[where] if some else keys
            )
    return tokens


def _draw_plain(logits: Tensor, samplings: Sequence[Sampling], keys: Tensor) -> Tensor:
    """Draw from the whole vocabulary, a few rows at a time."""
    if any(s.min_p for s in samplings):
        logits.masked_fill_(logits < _floor(logits.amax(-1, keepdim=True), samplings), -torch.inf)
    return loudest(logits, keys)


def loudest(logits: Tensor, keys: Tensor) -> Tensor:
    """Return the best token of each row with noise, from the whole vocabulary."""
    vocabulary = logits.shape[1]
    ids = torch.arange(vocabulary, device=logits.device).unsqueeze(0)
    step = max(1, _NOISE_CHUNK // vocabulary)
    parts = [
        (logits[at : at + step] + _gumbel(ids, keys[at : at + step])).argmax(-1)
        for at in range(0, len(logits), step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _draw_ranked(logits: Tensor, samplings: Sequence[Sampling], keys: Tensor) -> Tensor:
    """Draw from the best candidates, or from all tokens in rows whose top-p reaches deeper."""
    width = min(CANDIDATES, logits.shape[1])
    tokens, enough = _draw_among(logits, samplings, keys, width)
    if width < logits.shape[1] and not bool(enough.all()):
        deep = (~enough).nonzero().squeeze(1)
        chosen = [samplings[index] for index in deep.tolist()]
        tokens[deep], _ = _draw_among(logits[deep], chosen, keys[deep], logits.shape[1])
    return tokens


def _draw_among(
    logits: Tensor, samplings: Sequence[Sampling], keys: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    device = logits.device
    top_p = _column([s.top_p for s in samplings], device)
    limit = torch.tensor([[s.top_k or logits.shape[1]] for s in samplings], device=device)
    floor = _logs_of_min_p(samplings, device) if any(s.min_p for s in samplings) else None
    return among(logits, keys, Bounds(limit, top_p, floor), width)


class Bounds(NamedTuple):
    """Limits of the tokens that may be drawn, [rows, 1] each."""

    limit: Tensor  # top-k; the vocabulary size if off
    top_p: Tensor
    floor: Tensor | None  # the logarithm of min-p


def among(logits: Tensor, keys: Tensor, bounds: Bounds, width: int) -> tuple[Tensor, Tensor]:
    """Draw among the `width` best; also return for which rows these suffice."""
    limit, top_p, floor = bounds
    values, ids = logits.topk(width, dim=-1)
    keep = torch.arange(width, device=logits.device).unsqueeze(0) < limit
    within = values.masked_fill(~keep, -torch.inf)
    whole = torch.where(limit <= width, within.logsumexp(-1, True), logits.logsumexp(-1, True))
    mass = (within - whole).exp()
    before = mass.cumsum(-1) - mass
    keep &= (before < top_p) | (torch.arange(width, device=logits.device) == 0)
    enough = (limit <= width) | ((top_p < 1) & (before[:, -1:] + mass[:, -1:] >= top_p))
    # A top-k beyond the candidates renormalises over tokens that are not among them.
    enough &= (limit <= width) | (limit >= logits.shape[1])
    if floor is not None:
        keep &= values >= values[:, :1] + floor
    noisy = (values + _gumbel(ids, keys)).masked_fill(~keep, -torch.inf)
    return ids.gather(1, noisy.argmax(-1, keepdim=True)).squeeze(1), enough.squeeze(1)


def _floor(best: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the lowest logit that min-p allows, [rows, 1]."""
    return best + _logs_of_min_p(samplings, best.device)


def _logs_of_min_p(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    return _column([math.log(s.min_p) if s.min_p else -math.inf for s in samplings], device)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def _gumbel(ids: Tensor, keys: Tensor) -> Tensor:
    """Return Gumbel noise for token `ids` [rows or 1, n] under `keys` [rows, 2]; float32 [rows, n].

    Integer arithmetic in int64, cut to 32 bits, makes every device compute the same hash (lowbias32
    by C. Wellons, twice). 24 of its bits become a uniform number in the open interval (0, 1);
    float32 resolves its small end, which decides the maximum, well.
    """
    bits = (ids * 0x9E3779B1 + keys[:, :1]).bitwise_and_(_MASK32)
    _scramble(bits)
    bits.bitwise_xor_(keys[:, 1:])
    _scramble(bits)
    uniform = bits.bitwise_right_shift_(8).to(torch.float32).add_(0.5).mul_(2.0**-24)
    uniform.clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _scramble(bits: Tensor) -> None:
    bits.bitwise_xor_(bits >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK32)
    bits.bitwise_xor_(bits >> 15).mul_(0x846CA68B).bitwise_and_(_MASK32)
    bits.bitwise_xor_(bits >> 16)
