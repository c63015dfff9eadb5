"""Validation of jobs before they enter the engine's loop.

The libraries' loops trust their input, and one bad request ends the loop for all requests. So jobs
are validated on the caller's thread, where a failure is a response with status 400.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import structlog

from servekit.engines.api.base import EmbedJob, Job
from servekit.errors import ContextLengthExceeded, RequestError
from servekit.protocol.messages import SamplingParams

log: Any = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a job. `max_context` counts prompt and completion tokens together.

    `head_size` is the number of token ids that the model can generate; 0: its whole vocabulary.
    `fills`: see `base.Engine.fills_context`.
    """

    vocab_size: int
    max_context: int
    head_size: int = 0
    fills: bool = False


def check_job(job: Job, limits: Limits, virtual_tokens: int = 0) -> None:
    """Raise RequestError if the job cannot run or would harm other jobs.

    `virtual_tokens` of the job's adapter take room in the context, in addition to the prompt.
    """
    if (job.constraint is not None) != (job.params.grammar is not None):
        raise ValueError("a job with a grammar comes with what `constrain` made of it")
    if virtual_tokens:
        limits = replace(limits, max_context=limits.max_context - virtual_tokens)
    if not job.prompt_ids:
        raise RequestError(
            "The prompt is empty; the model needs at least one token.", param="prompt"
        )
    _check_ids(job.prompt_ids, limits.vocab_size)
    _check_ids(job.emitted, limits.head_size or limits.vocab_size)
    _check_params(job.params)
    _check_bias(job.params, limits)
    _check_stops(job.params, limits.vocab_size)
    _check_length(job, limits)


def check_inputs(job: EmbedJob, limits: Limits) -> None:
    """Raise RequestError if a text to embed is empty, too long or has invalid token ids."""
    for ids in job.inputs:
        if not 0 < len(ids) <= limits.max_context:
            raise ContextLengthExceeded(
                f"An input has {len(ids)} tokens; it must have 1 to {limits.max_context}.",
                param="input",
            )
        _check_ids(ids, limits.vocab_size)


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"Token id {bad} is not in the model's vocabulary (0 to {vocab_size - 1}).",
            param="prompt",
        )


def _check_length(job: Job, limits: Limits) -> None:
    prompt, limit = len(job.prompt_ids), limits.max_context
    if prompt == limit and job.params.max_tokens == 1 and limits.fills:
        return
    if prompt >= limit:
        raise ContextLengthExceeded(
            f"The prompt has {prompt} tokens, and this model's context has room for {limit}, "
            "with at least one for the answer.",
            param="prompt",
        )
    if job.params.max_tokens is None or job.params.max_tokens < 1:
        raise RequestError("max_tokens must be at least 1.", param="max_tokens")
    if prompt + job.params.max_tokens > limit:
        raise ContextLengthExceeded(
            f"{prompt} prompt tokens and max_tokens {job.params.max_tokens} exceed this model's "
            f"context of {limit} tokens.",
            param="max_tokens",
        )


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"stop_token_ids names token {token}, which is not in the model's vocabulary "
                f"(0 to {vocab_size - 1}).",
                param="stop_token_ids",
            )


#: Inclusive ranges. The gateway checks them too; this check keeps NaN out of the shared batch.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_p": (0.0, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "repetition_penalty": (1e-6, 1e6),
    "min_tokens": (0, math.inf),
    "logprobs": (0, 1000),
}
_BIAS = (-100.0, 100.0)


def _check_params(params: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(params, name)
        if value is not None and not low <= value <= high:
            raise RequestError(f"{name} must be between {low:g} and {high:g}.", param=name)


def usable_defaults(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling values of a model's files that a request might have, by name.

    The others would end the engine or give nonsense. A negative top_k is off, and a negative
    temperature greedy, as in llama.cpp, whose files have -1.
    """
    usable = {}
    for name, value in stated.items():
        low, high = _RANGES[name]
        number = isinstance(value, (int, float))
        if number and (low <= value <= high or (value < low and name in ("top_k", "temperature"))):
            usable[name] = max(value, low)
        else:
            log.warning("sampling_default_ignored", name=name, value=value, least=low, most=high)
    return usable


def _check_bias(params: SamplingParams, limits: Limits) -> None:
    size = limits.head_size or limits.vocab_size
    for token, value in params.logit_bias:
        if not 0 <= token < size:
            read = 0 <= token < limits.vocab_size
            what = "which the model can read but not generate" if read else "not in its vocabulary"
            raise RequestError(
                f"logit_bias names token {token}, {what} (0 to {size - 1}).",
                param="logit_bias",
            )
        if not _BIAS[0] <= value <= _BIAS[1]:
            raise RequestError("logit_bias must be between -100 and 100.", param="logit_bias")
