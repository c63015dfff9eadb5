"""The library's paged cache as decoding needs it: pages by layer, and room for the next token.

`DecodeStep` is the attention of one step over it, which every layer finds on its cache object.

Written for transformers 5.17, where each layer has its own tensors, and 5.23, where all layers
share one and a block holds the pages of all layers in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from servekit.engines.transformers.decode.host_attention import QueryGroup, attend_groups
from servekit.engines.transformers.decode.kernels import Attend

#: Share of blocks that the library's scheduler keeps free of new requests.
_MARGIN = 0.15


class LayerPages(Protocol):
    """Pages of `size` tokens in each layer."""

    size: int

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, [pages, page size, kv heads, width] each."""


class Pages:
    """The cache of a model with full attention in all layers. Raises ValueError for another."""

    def __init__(self, cache: Any, scheduler: Any) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._new = hasattr(cache, "layer_to_allocator")  # from 5.2x on
        owners = (
            list(cache.cache_allocators.values()) if self._new else list(cache.group_cache_managers)
        )
        if len(owners) != 1:
            raise ValueError("its layers attend in several ways")
        self._owner: Any = owners[0]
        self.size: int = self._owner.tokens_per_page if self._new else cache.block_size
        trash: int = self._owner.write_trash_index if self._new else cache.write_trash_index
        #: A page for data that is written but never read.
        self.trash = trash // self.size
        #: Factor from a block's number to its page's.
        self.stride: int = self._owner.block_physical_stride // self.size if self._new else 1

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        if self._new:
            keys, values = self._owner.get_cache_for_block_table(index)
            return keys, values
        _, place = self._cache.layer_index_to_group_indices[index]
        shape = (-1, self.size, *self._cache.key_cache[place].shape[1:])
        return self._cache.key_cache[place].view(shape), self._cache.value_cache[place].view(shape)

    def blocks(self, key: str) -> list[int]:
        """Return the blocks of a request, in order."""
        blocks: list[int] = self._owner.block_table[key]
        return blocks

    def reserve(self, state: Any, tokens: int = 1) -> bool:
        """Allocate room for more tokens; return False, with nothing done, if the cache is full."""
        if not self._new:
            found: bool = self._scheduler._allocate_blocks_if_needed(state, tokens)
            return found
        if self._cache.can_store_request_tokens(state, tokens):
            return True
        self._cache.pool.try_to_free_sectors()
        if self._cache.can_store_request_tokens(state, tokens):
            return True
        self._cache.evict_cached_blocks()
        self._cache.pool.try_to_free_sectors()
        return bool(self._cache.can_store_request_tokens(state, tokens))

    def is_ample(self) -> bool:
        """Return whether enough blocks are free to begin new requests beside those that decode."""
        if self._new:
            return bool(self._scheduler._try_to_meet_safety_margin())
        return bool(self._cache.get_num_free_blocks() >= _MARGIN * self._cache.num_blocks)

    def complete(self, state: Any) -> None:
        """Mark one more block of a request as full, so that it can be shared."""
        if not self._cache.use_prefix_sharing:
            return
        if self._new:
            self._cache.mark_complete_blocks(state, dict.fromkeys(self._cache.cache_allocators, 1))
        else:
            self._cache.mark_shareable_blocks_as_complete(state, 1)


@dataclass(slots=True)
class DecodeStep:
    """Requests with one token each: where the token is written, and what it attends to."""

    pages: LayerPages
    kernel: Attend
    table: Tensor  # [requests, pages] int32
    slots: Tensor  # [requests] int64, index into the tokens of all pages
    lengths: Tensor  # [requests] int32
    groups: Sequence[QueryGroup] = ()  # if set, the queries are attended to without the kernel

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        """Attend as `compute_attention` does: packed states [1, heads, requests, width]."""
        keys, values = self.pages.layer(layer)
        for pages, states in ((keys, key), (values, value)):
            flat = pages.view(-1, *pages.shape[2:])
            flat.index_copy_(0, self.slots, states[0].transpose(0, 1))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        asked = query[0].transpose(0, 1)
        if self.groups:
            return attend_groups(self.groups, asked, keys, values, scale).unsqueeze(0)
        return self.kernel(asked, keys, values, self.table, self.lengths, scale).unsqueeze(0)


@dataclass(slots=True)
class Holder:
    """The object that the model receives as its cache."""

    layout: DecodeStep | ChunkStep | None = None
    layers: tuple[()] = ()  # 5.24's Mllama looks there for the keys and values of images

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        return hand_over(self, key_states, value_states, layer_idx, kwargs)


def hand_over(
    cache: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Stand in for a cache's `update`: leave the cache, and what to write to it, to the attention.

    From transformers 5.24 on a layer calls its cache, and gives its attention `kwargs` alone.
    """
    kwargs["cache"] = cache
    return key_states, value_states


@dataclass(slots=True)
class ChunkStep:
    """Tokens of one request in sequence, after those in its pages."""

    pages: LayerPages
    index: Tensor  # [tokens with those before] int64, index into the tokens of all pages
    count: int  # number of new tokens

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor:
        """Attend as `compute_attention` does: packed states [1, heads, tokens, width]."""
        states: list[Tensor] = []
        for pages, new in zip(self.pages.layer(layer), (key, value), strict=True):
            flat = pages.view(-1, *pages.shape[2:])
            flat.index_copy_(0, self.index[-self.count :], new[0].transpose(0, 1))
            whole = flat[self.index].transpose(0, 1).unsqueeze(0)
            states.append(whole.repeat_interleave(query.shape[1] // whole.shape[1], 1))
        first = self.count == len(self.index)
        places = torch.arange(len(self.index), device=query.device)
        mask = None if first else places <= places[-self.count :].unsqueeze(1)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, states[0], states[1], attn_mask=mask, is_causal=first, scale=scaling
        )
        return out.transpose(1, 2)
