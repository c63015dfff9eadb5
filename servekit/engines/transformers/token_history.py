"""How often requests with penalties have used each token, in tensors that their rows share.

A step changes the logits of all such rows by the same few kernels. Generation configs of some
models ask for a repetition penalty, which every request then has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from servekit.engines.transformers.request_row import Row

#: Rows of the first tensors; full ones are replaced by tensors of twice as many.
_ROWS = 8


class TokenHistory:
    """The place of one request's counts, which is free again when the request is gone."""

    __slots__ = ("counted", "owner", "place")

    def __init__(self, owner: TokenHistories, place: int) -> None:
        self.owner = owner
        self.place = place
        self.counted = 0  # tokens of the completion

    def __del__(self) -> None:
        self.owner.free_place(self.place)


class TokenHistories:
    """The counts of the requests of one sampler: [places, vocabulary]."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # float32, of the completion
        self._seen: Tensor | None = None  # bool, in the whole context
        self._taken: set[int] = set()

    def count_tokens(self, rows: Sequence[Row], logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count what is new, and return the counts of all requests, and the places of these.

        Counts are how often each token is in the completion, and whether it is in the context:
        [places, vocabulary of `logits`], float32 and bool. Prompt tokens beyond the vocabulary are
        left out: they can only be read. Places are [len(rows)] int64.
        """
        fresh = [row for row in rows if row.history is None or row.history.owner is not self]
        for row in fresh:
            row.history = TokenHistory(self, self._take_place(logits))
        counts, seen = self._counts, self._seen
        assert counts is not None and seen is not None, "there is a row"
        if fresh:
            empty = _send([row.history.place for row in fresh if row.history], logits)
            counts[empty], seen[empty] = 0.0, False
            self._mark_prompts(fresh, seen)
        self._count_completions(rows, counts, seen)
        return counts, seen, _send([row.history.place for row in rows if row.history], logits)

    def free_place(self, place: int) -> None:
        """Free a place, and all memory with the last one."""
        self._taken.discard(place)
        if not self._taken:
            self._counts = self._seen = None

    def _take_place(self, like: Tensor) -> int:
        place = next(one for one in range(len(self._taken) + 1) if one not in self._taken)
        self._taken.add(place)
        size = 0 if self._counts is None else len(self._counts)
        if place >= size:
            self._counts = _grown(self._counts, max(_ROWS, 2 * size), like, torch.float32)
            self._seen = _grown(self._seen, max(_ROWS, 2 * size), like, torch.bool)
        return place

    @staticmethod
    def _mark_prompts(rows: Sequence[Row], seen: Tensor) -> None:
        places: list[int] = []
        tokens: list[int] = []
        for row in rows:
            assert row.history is not None
            read = {token for token in row.job.prompt_ids if token < seen.shape[1]}
            places += [row.history.place] * len(read)
            tokens += read
        at = _send([places, tokens], seen)
        seen[at[0], at[1]] = True

    @staticmethod
    def _count_completions(rows: Sequence[Row], counts: Tensor, seen: Tensor) -> None:
        """Count the tokens that have come since the last step."""
        places, tokens = [], []
        for row in rows:
            assert row.history is not None
            new = row.completion[row.history.counted :]
            places += [row.history.place] * len(new)
            tokens += new
            row.history.counted = len(row.completion)
        if tokens:
            at = _send([places, tokens], counts)
            one = torch.ones((), device=counts.device)
            counts.index_put_((at[0], at[1]), one, accumulate=True)
            seen[at[0], at[1]] = True


def _grown(old: Tensor | None, size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of `size` places with those of the old one."""
    new = torch.zeros((size, like.shape[-1]), dtype=dtype, device=like.device)
    if old is not None:
        new[: len(old)] = old
    return new


def _send(values: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
