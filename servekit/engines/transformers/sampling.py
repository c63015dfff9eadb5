"""Choice of tokens on the host, with greedy and sampled rows in one batch.

A sampled token is drawn by the Gumbel-max trick: the argmax of logits plus Gumbel noise is an exact
draw from their softmax. The noise is a hash of (seed, position, token id) instead of a generator's
state, so a request draws the same tokens alone, in a batch, after a move to another worker, and on
any device (up to the last bits of the logits). `position` counts the completion tokens before the
drawn one.

Filters apply in the order of `transformers`: temperature, top-k, top-p, min-p. Top-k and top-p
consider the 256 best candidates, and sort the whole vocabulary only for rows whose mass reaches
deeper. Token biases, penalties and grammars come first, and apply to greedy rows too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from servekit.engines.api.job_state import NOT_A_NUMBER, Scores
from servekit.engines.text.sampling_params import CANDIDATES, LEAST, Sampling, noise_keys
from servekit.engines.text.structured_output import mask_words
from servekit.engines.transformers.token_history import TokenHistories

if TYPE_CHECKING:
    from servekit.engines.transformers.request_row import Row

#: Number of logits per batch of noise, which limits the memory used for a large batch.
_NOISE_CHUNK = 8 * 2**20
_MASK32 = 0xFFFFFFFF
#: Number of logits that a CPU changes at a time, so that they stay in its cache.
_CACHED_LOGITS = 2**16


def best_tokens(logits: Tensor) -> Tensor:
    """Return the best token of each row; NOT_A_NUMBER if a logit is NaN.

    `logits` is [rows, vocabulary]; the ids are [rows] int64. This does not wait for the device: the
    host learns of NaN with the token.
    """
    most, tokens = logits.max(-1)  # NaN is more than any number
    return tokens.masked_fill_(most.isnan(), NOT_A_NUMBER)


class Sampler:
    """Sampler that changes a batch's logits so that each row's argmax is its chosen token."""

    def __init__(self) -> None:
        self._histories = TokenHistories()

    def apply(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Change `logits` [len(rows), vocabulary], float32, in place.

        Plain greedy rows are not touched and cost nothing; the others share their kernels.
        """
        masks = Masks(rows)
        report = Report(rows, logits)
        _add_biases(rows, logits)
        self._penalise_repeats(rows, logits)
        _forbid_tokens(rows, logits)
        masks.apply(logits)
        self._draw_rows(rows, logits)
        report.record_logits(logits)

    def _penalise_repeats(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Lower the logits of earlier tokens.

        OpenAI's penalties count the completion, the repetition penalty the whole context.
        """
        where = [index for index, row in enumerate(rows) if row.sampling.penalised]
        if not where:
            return
        penalised = [rows[index] for index in where]
        counts, seen, places = self._histories.count_tokens(penalised, logits)
        at = torch.tensor(where, device=logits.device)
        step = len(where) if logits.is_cuda else max(1, _CACHED_LOGITS // logits.shape[1])
        for first in range(0, len(where), step):
            part = slice(first, first + step)
            own, place = logits[at[part]], places[part]
            how = [row.sampling for row in penalised[part]]
            _penalise(own, counts[place], seen[place], how)
            logits[at[part]] = own

    def _draw_rows(self, rows: Sequence[Row], logits: Tensor) -> None:
        drawn = [index for index, row in enumerate(rows) if not row.sampling.greedy]
        if drawn:
            where = torch.tensor(drawn, device=logits.device)
            tokens = draw_tokens(
                logits[where],
                [rows[index].sampling for index in drawn],
                [rows[index].position for index in drawn],
            )
            best = logits[where, tokens]  # NaN if any is, which is not to be hidden
            logits[where, tokens] = best.masked_fill(~best.isnan(), torch.inf)


def _penalise(own: Tensor, counts: Tensor, seen: Tensor, samplings: Sequence[Sampling]) -> None:
    """Change the logits `own` in place; all three are [len(samplings), vocabulary]."""
    if any(one.repetition_penalty != 1.0 for one in samplings):
        factor = _column_tensor([one.repetition_penalty for one in samplings], own.device)
        lowered = torch.where(own > 0, own / factor, own * factor)
        torch.where(seen, lowered, own, out=own)
    if any(one.frequency_penalty for one in samplings):
        frequency = _column_tensor([one.frequency_penalty for one in samplings], own.device)
        own.addcmul_(counts, frequency, value=-1)
    if any(one.presence_penalty for one in samplings):
        presence = _column_tensor([one.presence_penalty for one in samplings], own.device)
        own.addcmul_((counts > 0).to(own.dtype), presence, value=-1)


def _add_biases(rows: Sequence[Row], logits: Tensor) -> None:
    biased = [(index, row) for index, row in enumerate(rows) if row.sampling.logit_bias]
    if not biased:
        return
    ids, values = zip(*(row.bias(logits.device) for _, row in biased), strict=True)
    owners = [index for index, row in biased for _ in row.sampling.logit_bias]
    where = (torch.tensor(owners, device=logits.device), torch.cat(ids))
    logits.index_put_(where, torch.cat(values), accumulate=True)


def _forbid_tokens(rows: Sequence[Row], logits: Tensor) -> None:
    """Forbid ends before `min_tokens`, and the last tokens of banned sequences."""
    forbidden: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        tokens = [*(row.eos if row.eos_forbidden else ()), *row.forbidden()]
        # an embedding may have more rows than its head
        forbidden += [(index, token) for token in tokens if token < logits.shape[-1]]
    if forbidden:
        owners, ids = torch.tensor(forbidden, device=logits.device).T
        logits[owners, ids] = -torch.inf


def draw_tokens(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Draw one token per row, ids [rows]; `logits` [rows, vocabulary] are overwritten."""
    device = logits.device
    logits.div_(_column_tensor([s.temperature for s in samplings], device))
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
        logits.masked_fill_(
            logits < _min_p_floor(logits.amax(-1, keepdim=True), samplings), -torch.inf
        )
    return draw_loudest(logits, keys)


def draw_loudest(logits: Tensor, keys: Tensor) -> Tensor:
    """Return the best token of each row with noise, from the whole vocabulary."""
    vocabulary = logits.shape[1]
    ids = torch.arange(vocabulary, device=logits.device).unsqueeze(0)
    step = max(1, _NOISE_CHUNK // vocabulary)
    parts = [
        (logits[at : at + step] + _gumbel_noise(ids, keys[at : at + step])).argmax(-1)
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
    top_p = _column_tensor([s.top_p for s in samplings], device)
    limit = torch.tensor([[s.top_k or logits.shape[1]] for s in samplings], device=device)
    floor = _logs_of_min_p(samplings, device) if any(s.min_p for s in samplings) else None
    return draw_among(logits, keys, Bounds(limit, top_p, floor), width)


class Bounds(NamedTuple):
    """Limits of the tokens that may be drawn, [rows, 1] each."""

    limit: Tensor  # top-k; the vocabulary size if off
    top_p: Tensor
    floor: Tensor | None  # the logarithm of min-p


def draw_among(logits: Tensor, keys: Tensor, bounds: Bounds, width: int) -> tuple[Tensor, Tensor]:
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
    noisy = (values + _gumbel_noise(ids, keys)).masked_fill(~keep, -torch.inf)
    return ids.gather(1, noisy.argmax(-1, keepdim=True)).squeeze(1), enough.squeeze(1)


def _min_p_floor(best: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the lowest logit that min-p allows, [rows, 1]."""
    return best + _logs_of_min_p(samplings, best.device)


def _logs_of_min_p(samplings: Sequence[Sampling], device: torch.device) -> Tensor:
    return _column_tensor([math.log(s.min_p) if s.min_p else -math.inf for s in samplings], device)


def _column_tensor(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def _gumbel_noise(ids: Tensor, keys: Tensor) -> Tensor:
    """Return Gumbel noise for token `ids` [rows or 1, n] under `keys` [rows, 2]; float32 [rows, n].

    Integer arithmetic in int64, cut to 32 bits, makes every device compute the same hash (lowbias32
    by C. Wellons, twice). 24 of its bits become a uniform number in the open interval (0, 1);
    float32 resolves its small end, which decides the maximum, well.
    """
    bits = (ids * 0x9E3779B1 + keys[:, :1]).bitwise_and_(_MASK32)
    _scramble_bits(bits)
    bits.bitwise_xor_(keys[:, 1:])
    _scramble_bits(bits)
    uniform = bits.bitwise_right_shift_(8).to(torch.float32).add_(0.5).mul_(2.0**-24)
    uniform.clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _scramble_bits(bits: Tensor) -> None:
    bits.bitwise_xor_(bits >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK32)
    bits.bitwise_xor_(bits >> 15).mul_(0x846CA68B).bitwise_and_(_MASK32)
    bits.bitwise_xor_(bits >> 16)


# ---------------------------------------------------------------- grammars


class Masks:
    """Bit masks of the allowed next tokens, for the rows of a batch that have a grammar.

    A forbidden token gets a logit of minus infinity.
    They are computed on the CPU while the forward pass still runs on the device.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        bound = [
            (index, row.constraint, row.end_unwanted)
            for index, row in enumerate(rows)
            if row.constraint is not None
        ]
        self._indices = [index for index, _, _ in bound]
        words = max((mask_words(constraint.vocab_size) for _, constraint, _ in bound), default=0)
        self._size = 32 * words
        self._bits = np.zeros((len(bound), words), np.int32)
        for bits, (_, constraint, end_unwanted) in zip(self._bits, bound, strict=True):
            constraint.fill_mask(bits, avoid_end=end_unwanted)

    def apply(self, logits: Tensor) -> None:
        """Change `logits` [rows, vocabulary] in place, only in rows with a grammar."""
        if not self._indices:
            return
        bits = torch.from_numpy(self._bits).to(logits.device).unsqueeze(-1)
        places = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (bits >> places).bitwise_and_(1).bool().flatten(1)[:, : logits.shape[1]]
        where = torch.tensor(self._indices, device=logits.device)
        masked = logits[where]
        masked[:, : self._size].masked_fill_(~allowed, -torch.inf)
        masked[:, self._size :] = -torch.inf  # rows of the head without a token
        logits[where] = masked


# ---------------------------------------------------------------- log probabilities


class Report:
    """Reader of a batch's unchanged logits that later sets the scores of its rows.

    Log probabilities are the log-softmax of the model's raw logits, before bias, penalties,
    grammar, temperature and filters, as in OpenAI's API. So a token forced by a grammar or a bias
    may be improbable, and the best tokens need not contain it.
    """

    def __init__(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Read `logits` [rows, vocabulary] as the model returned them."""
        self._rows = [(index, row) for index, row in enumerate(rows) if row.wants_logprobs]
        if self._rows:
            self._where = torch.tensor([index for index, _ in self._rows], device=logits.device)
            self._logs = logits[self._where].log_softmax(-1)

    def record_logits(self, logits: Tensor) -> None:
        """Set each row's `scores`; the argmax of `logits` is the chosen token."""
        if not self._rows:
            return
        chosen = logits[self._where].argmax(-1, keepdim=True)
        width = max(row.sampling.logprobs or 0 for _, row in self._rows)
        values, ids = self._logs.topk(min(width, logits.shape[1]), dim=-1)
        of_chosen = self._logs.gather(1, chosen)
        # A single transfer: ids are exact in float64, and so is every float32.
        numbers = torch.cat([of_chosen.double(), values.double(), ids.double()], dim=1).tolist()
        for (_, row), numbers_of_row in zip(self._rows, numbers, strict=True):
            row.scores = _make_scores(numbers_of_row, values.shape[1], row.sampling.logprobs or 0)
            row.broken |= math.isnan(row.scores.chosen)


def _make_scores(numbers: list[float], width: int, wanted: int) -> Scores:
    chosen, values, ids = numbers[0], numbers[1 : 1 + width], numbers[1 + width :]
    pairs = zip(ids[:wanted], values[:wanted], strict=True)
    return Scores(max(chosen, LEAST), tuple((int(i), max(value, LEAST)) for i, value in pairs))
