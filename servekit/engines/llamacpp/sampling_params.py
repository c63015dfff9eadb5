"""Sampling in numpy with the rules and noise of `engines.transformers.sampling`, one row at a time.

A request with a seed draws the same tokens as there, up to rounding of the logits. Few tokens can
win a draw: noise ranges from -2.9 to 16.7, so tokens whose logits are further below the best one
are dropped beforehand, which changes nothing and saves nearly all of the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from servekit.engines.api.job_state import NOT_A_NUMBER, Scores
from servekit.engines.llamacpp.request_row import LlamaRow
from servekit.engines.text.sampling_params import CANDIDATES, LEAST, Sampling, noise_keys
from servekit.engines.text.structured_output import Constraint, mask_words

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

_MASK32 = np.uint64(0xFFFFFFFF)
#: More than the noise of any token: -log(-log(1 - 2^-24)) is 16.64.
_MOST_NOISE = np.float32(16.7)
#: Distances below the best logit, tried in turn, in search of the best candidates.
_BELOW = (np.float32(4), np.float32(8), np.float32(16))


def choose_token(row: LlamaRow, logits: Logits) -> int:
    """Return the row's next token, and set its `scores` if requested.

    Returns NOT_A_NUMBER if there is a NaN in `logits` [vocabulary], which are llama.cpp's memory
    and are not changed.
    """
    best = int(logits.argmax())  # of the first NaN, if there is one
    if math.isnan(logits[best]):
        return NOT_A_NUMBER
    if row.plain:
        return best
    steered = _steer_logits(row, logits)
    sampling = row.sampling
    token = (
        int(steered.argmax()) if sampling.greedy else draw_token(steered, sampling, row.position)
    )
    if sampling.logprobs is not None:
        row.scores = _score_token(logits, token, sampling.logprobs)
    return token


# ---------------------------------------------------------------- before the draw


def _steer_logits(row: LlamaRow, logits: Logits) -> Logits:
    """Copy the logits and apply bias, penalties, `min_tokens`, banned words, grammar in order."""
    steered = logits.copy()
    for token, bias in row.sampling.logit_bias:
        steered[token] += np.float32(bias)
    if row.sampling.penalised:
        _penalise_repeats(row, steered)
    if row.eos_forbidden:
        steered[list(row.eos)] = -np.inf
    if row.job.banned:
        steered[row.forbidden()] = -np.inf
    if row.constraint is not None:
        _apply_grammar(row.constraint, steered, avoid_end=row.end_unwanted)
    return steered


def _penalise_repeats(row: LlamaRow, logits: Logits) -> None:
    """Apply penalties: OpenAI's count the completion, repetition counts the whole context."""
    sampling = row.sampling
    seen, said, counts = row.history()
    if sampling.repetition_penalty != 1.0:
        before, factor = logits[seen], np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(before > 0, before / factor, before * factor)
    logits[said] -= counts * np.float32(sampling.frequency_penalty)
    logits[said] -= np.float32(sampling.presence_penalty)


def _apply_grammar(constraint: Constraint, logits: Logits, *, avoid_end: bool) -> None:
    words = np.zeros(mask_words(constraint.vocab_size), np.int32)
    constraint.fill_mask(words, avoid_end=avoid_end)
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)]
    logits[allowed == 0] = -np.inf


# ---------------------------------------------------------------- log probabilities


def _score_token(logits: Logits, token: int, count: int) -> Scores:
    """Return log probabilities from the model's unchanged logits."""
    total = _log_sum(logits)
    best = _best_ids(logits, count)
    pairs = tuple((int(other), max(float(logits[other]) - total, LEAST)) for other in best)
    return Scores(max(float(logits[token]) - total, LEAST), pairs)


def score_prompt(
    row: LlamaRow, start: int, count: int, last: int, logits: Callable[[int], Logits]
) -> bool:
    """Collect log probabilities of prompt tokens after a pass over `count` tokens from `start` on.

    `last` is the place of the last token in the batch; `logits` returns the logits of a place.
    Returns False at the first NaN.
    """
    ids, width = row.job.prompt_ids, row.job.params.prompt_logprobs or 0
    for position in range(max(start, len(row.prompt_scores) - 1), start + count):
        if position + 1 >= len(ids):
            break
        found, token = logits(last - (start + count - 1 - position)), ids[position + 1]
        if math.isnan(found.max()):
            return False
        scores = _score_token(found, token, width)
        rank = int((found > found[token]).sum()) + 1
        row.note_prompt(token, scores.chosen, rank, scores.best)
    return True


def _log_sum(logits: Logits) -> float:
    highest = float(logits.max())
    return highest + math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))


def _best_ids(logits: Logits, count: int) -> Ids:
    """Return the ids of the `count` highest logits, highest first."""
    if count == 0:
        return np.empty(0, np.intp)
    ids = _top_candidates(logits, count)
    if len(ids) > count:
        ids = ids[np.argpartition(logits[ids], len(ids) - count)[-count:]]
    return ids[np.argsort(-logits[ids], kind="stable")]


def _top_candidates(logits: Logits, count: int) -> Ids:
    """Return the ids of at least the `count` highest logits.

    Most others are left out, because sorting the whole vocabulary takes ten times as long.
    """
    highest = logits.max()
    for below in _BELOW if count < len(logits) else ():
        ids: Ids = (logits >= highest - below).nonzero()[0]
        if len(ids) >= count:
            return ids
    return np.arange(len(logits))


# ---------------------------------------------------------------- the draw


def draw_token(logits: Logits, sampling: Sampling, position: int) -> int:
    """Draw a token. `logits` [vocabulary] are overwritten."""
    logits /= np.float32(sampling.temperature)
    keys = noise_keys(sampling.seed, position)
    if not sampling.ranked:
        return _draw_plain(logits, sampling, keys)
    token, enough = _draw_among(logits, sampling, keys, CANDIDATES)
    if not enough:
        token, _ = _draw_among(logits, sampling, keys, len(logits))
    return token


def _draw_plain(logits: Logits, sampling: Sampling, keys: tuple[int, int]) -> int:
    top = np.array([logits.argmax()])
    lowest = logits[top] + _gumbel_noise(top, keys) - _MOST_NOISE
    if sampling.min_p:
        lowest = np.maximum(lowest, logits[top] + np.float32(math.log(sampling.min_p)))
    ids = (logits >= lowest).nonzero()[0]
    return int(ids[(logits[ids] + _gumbel_noise(ids, keys)).argmax()])


def _draw_among(
    logits: Logits, sampling: Sampling, keys: tuple[int, int], width: int
) -> tuple[int, bool]:
    """Draw among the `width` best; also return whether these were all candidates."""
    size = len(logits)
    width = min(width, size)
    ids = _best_ids(logits, width)
    values, limit = logits[ids], sampling.top_k or size
    keep = np.arange(width) < limit
    within = values[keep]
    mass = np.exp(within - np.float32(_log_sum(within if limit <= width else logits)))
    before = np.cumsum(mass, dtype=np.float32) - mass
    enough = limit <= width or (sampling.top_p < 1 and before[-1] + mass[-1] >= sampling.top_p)
    enough = (enough and (limit <= width or limit >= size)) or width == size
    allowed = before < sampling.top_p
    allowed[0] = True
    if sampling.min_p:
        allowed &= within >= within[0] + np.float32(math.log(sampling.min_p))
    left = ids[: len(within)][allowed]
    return int(left[(logits[left] + _gumbel_noise(left, keys)).argmax()]), bool(enough)


def _gumbel_noise(ids: Ids, keys: tuple[int, int]) -> Logits:
    """Return Gumbel noise for token `ids` [n], bit for bit that of `transformers.sampling`."""
    first, second = np.uint64(keys[0]), np.uint64(keys[1])
    bits = (ids.astype(np.uint64) * np.uint64(0x9E3779B1) + first) & _MASK32
    bits = _scramble_bits(_scramble_bits(bits) ^ second)
    uniform = ((bits >> np.uint64(8)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
    uniform = np.minimum(uniform, np.float32(1 - 2.0**-24))
    noise: Logits = -np.log(-np.log1p(-uniform))  # of 1 - u, as there
    return noise


def _scramble_bits(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = ((bits ^ (bits >> np.uint64(16))) * np.uint64(0x7FEB352D)) & _MASK32
    bits = ((bits ^ (bits >> np.uint64(15))) * np.uint64(0x846CA68B)) & _MASK32
    return bits ^ (bits >> np.uint64(16))
