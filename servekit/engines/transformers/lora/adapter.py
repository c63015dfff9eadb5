"""A loaded adapter, as the engine's loop sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from servekit.protocol.adapters import AdapterMode


@dataclass(frozen=True, slots=True)
class Factors:
    """What a low-rank adapter adds to one layer: `x @ down.T @ up`, its scaling in `up`.

    `down` is [rank, in], `up` [rank, out].
    """

    down: Tensor
    up: Tensor


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter in one of its three forms.

    mixed: `factors` by module name, or a `prompt` of virtual tokens; run in the base's own steps.
    grouped, merged: a `model` of its own, run instead of the base in steps of its own.
    """

    name: str
    uid: int  # never given twice: a later adapter of the same name is another one
    mode: AdapterMode = "mixed"
    factors: dict[str, Factors] = field(default_factory=dict)
    prompt: Tensor | None = None  # [virtual tokens, hidden size]
    model: Any | None = None

    @property
    def group(self) -> int:
        """Rows of one group may share a step; 0 is the base model's."""
        return 0 if self.model is None else self.uid

    @property
    def virtual_tokens(self) -> int:
        """Tokens that stand before each prompt, and are no one's."""
        return 0 if self.prompt is None else int(self.prompt.shape[0])
