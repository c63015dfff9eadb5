"""Checks that an adapter must pass before it is served, on the device that it will run on.

Alone:
- every tensor is finite and on the worker's device (`peft_model.build`);
- its layers have an effect, are accurate, and can be merged (`layer_checks.check`);
- the model's output with the adapter is finite and differs from the base's;
- merged, if that is its mode, the model gives the same output as unmerged;
- if it has its own model, that gives the same output in the paged cache (`paged_model.prepare`).

In the engine's own batch, beside the base and other adapters, while the engine serves: two prompts
give the same output as alone, and the base and the other adapters give the same output as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from servekit.engines.transformers.lora import layer_checks
from servekit.engines.transformers.lora.adapter_files import PARAM
from servekit.engines.transformers.lora.module_clone import ModuleClones, logits_of
from servekit.engines.transformers.lora.tolerance import Tolerance, error
from servekit.errors import RequestError

#: Lengths of the test prompts, and the number of tokens generated for each.
LENGTHS = (5, 11)
TOKENS = 3


@dataclass(frozen=True, slots=True)
class Alone:
    """Output of an adapter alone, in the model's plain attention."""

    logits: Tensor  # float32 [tokens, vocabulary], after the longer prompt
    effect: float  # relative to the base's logits
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Said:
    """Output of a test prompt: `logits` [tokens, vocabulary] before each token of `completion`."""

    completion: tuple[int, ...]
    logits: Tensor


def prompt(length: int, vocab_size: int) -> list[int]:
    """Return the token ids of a test prompt, spread over the vocabulary."""
    return [(7919 * (index + length)) % vocab_size for index in range(length)]


def alone(model: Any, skeletons: ModuleClones, vocab_size: int, tolerance: Tolerance) -> Alone:
    """Verify a PeftModel alone. Raises RequestError with the failed check."""
    ids = prompt(LENGTHS[-1], vocab_size)
    said: list[Tensor] = []

    def run() -> None:
        said.append(logits_of(model, ids, len(ids)))

    figures = layer_checks.check(model, run, tolerance)
    logits, base = said[0], skeletons.logits(ids, len(ids))
    if not torch.isfinite(logits).all():
        raise RequestError("The model's logits are NaN or Inf with the adapter.", param=PARAM)
    effect = error(logits, base)
    if effect == 0:
        raise RequestError(
            "The adapter changes nothing: the model says with it what it says without.", param=PARAM
        )
    return Alone(logits, effect, figures | {"effect": effect})


def merged(model: Any, before: Alone, vocab_size: int, tolerance: Tolerance) -> dict[str, float]:
    """Compare a merged model with its output before merging. Raises RequestError."""
    ids = prompt(LENGTHS[-1], vocab_size)
    found = error(logits_of(model, ids, len(ids)), before.logits)
    return {"merged_error": _require(found, before.effect, tolerance, "merged into the weights")}


def batched(
    said: Sequence[Tensor], expected: Sequence[Tensor], effect: float, tolerance: Tolerance
) -> float:
    """Compare logits [tokens, vocabulary] from the engine's batch with those computed alone."""
    pairs = zip(said, expected, strict=True)
    found = max((error(a, b) for a, b in pairs), key=lambda value: (value != value, value))
    return _require(found, effect, tolerance, "in a batch with others")


def disturbed(said: Said, before: Said, tolerance: Tolerance, who: str) -> float:
    """Compare the output of another model beside the adapter with its output without the adapter.

    The comparison ends where the completions diverge: between two almost equally likely tokens
    rounding decides, and the output after another token is rightly different.
    """
    pairs = zip(said.completion, before.completion, strict=True)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    found = error(said.logits[: alike + 1], before.logits[: alike + 1].to(said.logits.device))
    if not found <= tolerance.logits:
        raise RequestError(
            f"Beside the adapter {who} says something else: {found:.1%} off.", param=PARAM
        )
    return found


def _require(found: float, effect: float, tolerance: Tolerance, how: str) -> float:
    allowed = tolerance.allowed(effect)
    if not found <= allowed:
        raise RequestError(
            f"The adapter says something else {how} than alone: its logits are {found:.1e} off, "
            f"where its whole effect is {effect:.1e} and {allowed:.0e} is allowed.",
            param=PARAM,
        )
    return found


Reference = Callable[[list[int], int], Tensor]
