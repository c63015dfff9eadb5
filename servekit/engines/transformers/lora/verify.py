"""What an adapter must prove before it is served, on the device that it will run on.

By itself:
- every tensor is a number, and on the worker's device (`tuner.build`);
- its layers are alive, right, and mergeable (`layers.check`);
- the model with it says something else than the base, and nothing that is no number;
- merged, where it will be, the model says what it says unmerged;
- where it has a model of its own, that says in pages what it says by itself (`Runner.prove`).

In the engine's own batch, beside the base and others, while it serves: the same two prompts give
what they give alone; the base and the neighbours give what they gave before.
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

#: Lengths of the prompts that are tried, and how many tokens each is gone on with.
LENGTHS = (5, 11)
TOKENS = 3


@dataclass(frozen=True, slots=True)
class Alone:
    """What an adapter says by itself, in the model's plain attention."""

    logits: Tensor  # float32 [tokens, vocabulary], after the longer prompt
    effect: float  # relative to what the base says there
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Said:
    """What a probe went on with: `logits` [tokens, vocabulary] before each of `completion`."""

    completion: tuple[int, ...]
    logits: Tensor


def prompt(length: int, vocab_size: int) -> list[int]:
    """Token ids of a probe, spread over the vocabulary."""
    return [(7919 * (index + length)) % vocab_size for index in range(length)]


def alone(model: Any, skeletons: ModuleClones, vocab_size: int, tolerance: Tolerance) -> Alone:
    """Verify a PeftModel by itself. Raises RequestError with what is wrong."""
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
    """Compare a merged model with what it said unmerged."""
    ids = prompt(LENGTHS[-1], vocab_size)
    found = error(logits_of(model, ids, len(ids)), before.logits)
    return {"merged_error": _require(found, before.effect, tolerance, "merged into the weights")}


def batched(
    said: Sequence[Tensor], expected: Sequence[Tensor], effect: float, tolerance: Tolerance
) -> float:
    """Compare logits [tokens, vocabulary] from the engine's batch with those from alone."""
    pairs = zip(said, expected, strict=True)
    found = max((error(a, b) for a, b in pairs), key=lambda value: (value != value, value))
    return _require(found, effect, tolerance, "in a batch with others")


def disturbed(said: Said, before: Said, tolerance: Tolerance, who: str) -> float:
    """Compare what someone else says beside the adapter with what it said without.

    As far as both went on alike: where two tokens are nearly as likely, rounding chooses, and what
    follows another token is rightly other.
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
