"""Attention data of one step, which every layer finds on its cache object."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from servekit.engines.transformers.decode.kernels import Attend
from servekit.engines.transformers.decode.page_table import Pages


@dataclass(slots=True)
class Step:
    """Requests with one token each: where the token is written, and what it attends to."""

    pages: Pages
    kernel: Attend
    table: Tensor  # [requests, pages] int32
    slots: Tensor  # [requests] int64, index into the tokens of all pages
    lengths: Tensor  # [requests] int32

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        """Attend as `paged_attention.attend` does: packed states [1, heads, requests, width]."""
        keys, values = self.pages.layer(layer)
        for pages, states in ((keys, key), (values, value)):
            flat = pages.view(-1, *pages.shape[2:])
            flat.index_copy_(0, self.slots, states[0].transpose(0, 1))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        asked = query[0].transpose(0, 1)
        return self.kernel(asked, keys, values, self.table, self.lengths, scale).unsqueeze(0)


@dataclass(slots=True)
class Holder:
    """The object that the model receives as its cache."""

    layout: Step | None = None
