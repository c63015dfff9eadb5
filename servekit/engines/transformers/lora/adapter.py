"""A loaded adapter, as the engine's loop uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from servekit.protocol.adapters import AdapterMode


@dataclass(frozen=True, slots=True)
class Factors:
    """The addition of a low-rank adapter to one layer: `x @ down.T @ up`, with its scaling in `up`.

    `down` is [rank, in], `up` [rank, out].
    """

    down: Tensor
    up: Tensor


@dataclass(slots=True, eq=False)
class Adapter:
    """An adapter in one of its three modes.

    mixed: `factors` by module name, or a `prompt` of virtual tokens; runs in the base's own steps.
    grouped, merged: a separate `model`, which runs instead of the base in separate steps. Of models
    with eyes or ears, `plain` are the same modules with the attention that the base came with.
    """

    name: str
    uid: int  # never reused: a later adapter of the same name gets another
    mode: AdapterMode = "mixed"
    factors: dict[str, Factors] = field(default_factory=dict)
    prompt: Tensor | None = None  # [virtual tokens, hidden size]
    model: Any | None = None
    plain: Any | None = None
    number: int = 0  # of its factors in the table of addresses, while it is installed

    @property
    def group(self) -> int:
        """Return the group of rows that may share a step; 0 is the base model's."""
        return 0 if self.model is None else self.uid

    @property
    def virtual_tokens(self) -> int:
        """Return the number of virtual tokens before each prompt."""
        return 0 if self.prompt is None else int(self.prompt.shape[0])
