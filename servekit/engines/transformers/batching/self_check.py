"""Load-time check that a model gives the same output in the paged cache as alone.

A model whose attention ignores the paged cache does not fail: it generates nonsense, or the text of
another request. So two short requests of different lengths run together, with a prompt and two
further tokens each, and their logits are compared with those of the model's plain forward pass. If
steps are started before the last one's tokens are known, these must yield the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.base import Job
from servekit.engines.text.sampling_params import Sampling
from servekit.engines.transformers.batching.continuous import ContinuousRunner
from servekit.engines.transformers.lora.module_clone import logits_of
from servekit.engines.transformers.request_row import Row
from servekit.protocol.messages import SamplingParams

_LENGTHS = (5, 9)
_TOKENS = 3
#: Relative error of the logits. Rounding causes 1e-5 and 2e-2, a wrong attention 0.5.
_TOLERANCE = {torch.float32: 1e-2}
_HALF_TOLERANCE = 0.15


class Disagreement(ValueError):
    """Raised if a model's output in the paged cache differs from its own."""


def check_model(model: PreTrainedModel, runner: ContinuousRunner, plain_attention: str) -> None:
    """Raise Disagreement, or any error of running the model. Leaves the runner empty."""
    rows = [_probe_row(model, length) for length in _LENGTHS]
    paged = runner.logits_of(rows)
    own_attention = str(model.config._attn_implementation)
    model.set_attn_implementation(plain_attention)
    try:
        errors = [
            relative_error(paged[row.key], logits_of(model, row.context[:-1], _TOKENS))
            for row in rows
        ]
    finally:
        model.set_attn_implementation(own_attention)
    check_errors(model, errors)
    if runner.decodes:
        _check_unwatched(model, runner, rows)


def check_errors(model: PreTrainedModel, errors: Sequence[float]) -> None:
    """Raise Disagreement if relative errors of logits are more than rounding's."""
    allowed = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    if not max(errors) <= allowed:  # NaN is no agreement
        raise Disagreement(f"its logits are off by {max(errors):.1%} when run in pages")


def _check_unwatched(model: PreTrainedModel, runner: ContinuousRunner, rows: list[Row]) -> None:
    again = [_probe_row(model, len(row.job.prompt_ids)) for row in rows]
    for row in again:
        runner.add(row)
    while runner.running or runner.waiting:
        runner.step()
    if [row.completion for row in again] != [row.completion for row in rows]:
        raise Disagreement("its tokens differ when logits are not recorded")


def probe_prompt(length: int, vocab_size: int) -> list[int]:
    """Return the token ids of a test prompt, spread over the vocabulary."""
    return [(7919 * (index + length)) % vocab_size for index in range(length)]


def _probe_row(model: PreTrainedModel, length: int) -> Row:
    embedding: Any = model.get_input_embeddings()
    prompt = probe_prompt(length, embedding.weight.shape[0])
    job = Job(-length, prompt, SamplingParams(max_tokens=_TOKENS))
    return Row(f"probe{length}", job, Sampling(temperature=0.0), frozenset(), _TOKENS)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error in float32; NaN if either tensor has one."""
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))
