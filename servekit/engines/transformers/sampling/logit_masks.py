"""Enforcement of grammars: a forbidden token gets a logit of minus infinity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from servekit.engines.text.structured_output import mask_words

if TYPE_CHECKING:
    from servekit.engines.transformers.request_row import Row


class Masks:
    """Bit masks of the allowed next tokens, for the rows of a batch that have a grammar.

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
            constraint.fill(bits, avoid_end=end_unwanted)

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
