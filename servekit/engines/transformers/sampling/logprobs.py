"""Log probabilities of chosen and best tokens, for rows that request them.

They are the log-softmax of the model's raw logits, before bias, penalties, grammar, temperature and
filters, as in OpenAI's API. So a token forced by a grammar or a bias may be improbable, and the
best tokens need not contain it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from servekit.engines.api.job_state import Scores
from servekit.engines.text.sampling_params import LEAST

if TYPE_CHECKING:
    from servekit.engines.transformers.request_row import Row


class Report:
    """Reader of a batch's unchanged logits that later sets the scores of its rows."""

    def __init__(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Read `logits` [rows, vocabulary] as the model returned them."""
        self._rows = [(index, row) for index, row in enumerate(rows) if row.wants_logprobs]
        if self._rows:
            self._where = torch.tensor([index for index, _ in self._rows], device=logits.device)
            self._logs = logits[self._where].log_softmax(-1)

    def tell(self, logits: Tensor) -> None:
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
            row.scores = _scores(numbers_of_row, values.shape[1], row.sampling.logprobs or 0)
            row.broken |= math.isnan(row.scores.chosen)


def _scores(numbers: list[float], width: int, wanted: int) -> Scores:
    chosen, values, ids = numbers[0], numbers[1 : 1 + width], numbers[1 + width :]
    pairs = zip(ids[:wanted], values[:wanted], strict=True)
    return Scores(max(chosen, LEAST), tuple((int(i), max(value, LEAST)) for i, value in pairs))
