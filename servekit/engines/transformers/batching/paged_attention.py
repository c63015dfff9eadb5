"""Attention over the paged cache, request by request.

The library packs all requests of a batch into one sequence and, with sdpa, masks the keys of other
requests: each token is multiplied with all keys of the batch, and work grows with the square of the
batch size. On a GPU, FlashAttention's kernel for packed sequences attends for all requests at once
(`Packed`). Where it cannot, decoding requests are arranged side by side, [requests, heads,
longest], in groups whose lengths differ by at most a factor of two, and attention for each prompt
chunk is computed separately. The cache, its pages and the order of the packed tokens remain the
library's.

The layout of a step is known on the host before the forward pass (`Layout.build`) and set on the
cache object, where every layer finds it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.eager_paged import eager_paged_attention_forward

from servekit.engines.transformers.decode.page_table import ChunkStep, DecodeStep
from servekit.errors import describe_error

log: Any = structlog.get_logger(__name__)

#: The name under which the library finds this attention.
NAME = "paged_by_request"
#: Requests shorter than this share a group, whatever their lengths.
_SHORT = 128
#: Lengths are rounded up to this multiple, as GPU kernels require for masks.
_ALIGN = 32
#: Features of other attentions that are unsupported here; to ignore them would give wrong text.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "sinks", "indices", "block_indices")
#: Relative error of rounding to 16 bits; a wrong mask exceeds it by far.
_TOLERANCE = 2e-2
#: The name of the library's eager attention over its paged cache.
_EAGER = "paged|eager"


@dataclass(frozen=True, slots=True)
class Span:
    """The place and number of one request's queries and keys in the packed batch."""

    query: int
    queries: int
    key: int
    keys: int


@dataclass(slots=True)
class Group:
    """Decoding requests side by side: `size` rows of `length` gathered keys from `start` on.

    `mask` is true where there is a key; None if there is one everywhere. `bias` is computed by the
    first layer for all of them.
    """

    rows: Tensor  # [size] positions in the packed queries
    start: int
    size: int
    length: int
    mask: Tensor | None  # [size, 1, 1, length]
    _bias: Tensor | None = None

    def bias(self, like: Tensor) -> Tensor | None:
        """Return the mask as values to add to the scores, in the queries' dtype."""
        if self._bias is None and self.mask is not None:
            zeros = torch.zeros_like(self.mask, dtype=like.dtype)
            self._bias = zeros.masked_fill_(~self.mask, float("-inf"))
        return self._bias


@dataclass(slots=True)
class Chunk:
    """A chunk of one prompt; `span.key` counts in the gathered keys; no mask means causal."""

    span: Span
    mask: Tensor | None  # [queries, keys]


@dataclass(slots=True)
class Packed:
    """All requests for a kernel of packed sequences, in the batch's own order."""

    query_ends: Tensor  # [requests + 1] int32, offsets into the packed queries
    key_ends: Tensor  # likewise, into the gathered keys
    most_queries: int
    most_keys: int

    @classmethod
    def build(cls, pasts: Sequence[int], queries: Sequence[int], device: torch.device) -> Packed:
        keys = [past + count for past, count in zip(pasts, queries, strict=True)]
        ends = [[0, *accumulate(queries)], [0, *accumulate(keys)]]
        query_ends, key_ends = torch.tensor(ends, dtype=torch.int32).to(device, non_blocking=True)
        return cls(query_ends, key_ends, max(queries), max(keys))

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """Attend causally, with each request's queries at its end: [tokens, heads, width]."""
        out: Tensor = torch.ops.aten._flash_attention_forward(
            *(query, keys, values, self.query_ends, self.key_ends),
            *(self.most_queries, self.most_keys, 0.0, True, False),
            scale=scaling,
        )[0]
        return out


@dataclass(slots=True)
class Layout:
    """The arrangement of requests in one step's packed batch: `packed`, or groups and chunks.

    `gather` selects the entries of the library's read index in the order of the groups and chunks;
    it is None if nothing is cached yet and keys are the batch's own. `pasts` and `queries` are the
    arguments that the layout was computed from.
    """

    pasts: Sequence[int] = ()
    queries: Sequence[int] = ()
    groups: list[Group] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    gather: Tensor | None = None
    packed: Packed | None = None
    _read: Tensor | None = None

    @classmethod
    def build(
        cls,
        pasts: Sequence[int],
        queries: Sequence[int],
        device: torch.device,
        *,
        packed: bool = False,
    ) -> Layout:
        """Lay out requests, in batch order, by the number of tokens cached and new."""
        if packed:
            return cls(pasts, queries, packed=Packed.build(pasts, queries, device))
        if not any(pasts):
            spans = _make_spans([0] * len(queries), queries)
            return cls(pasts, queries, chunks=[Chunk(span, None) for span in spans])
        spans = _make_spans(pasts, queries)
        layout = cls(pasts, queries)
        picks: list[Tensor] = []
        at = 0
        for bucket in _bucket_spans([span for span in spans if span.queries == 1]):
            group, pick = _make_group(bucket, at, device)
            layout.groups.append(group)
            picks.append(pick)
            at += len(pick)
        for span in spans:
            if span.queries > 1:
                moved = Span(span.query, span.queries, at, span.keys)
                layout.chunks.append(Chunk(moved, _causal_mask(moved, device)))
                picks.append(torch.arange(span.key, span.key + span.keys, device=device))
                at += span.keys
        layout.gather = torch.cat(picks)
        return layout

    def read_index(self, packed: Tensor) -> Tensor:
        """Return what to read from the cache; computed by the first layer for all of them."""
        if self.gather is None:
            return packed
        if self._read is None:
            self._read = packed[self.gather]
        return self._read


def _make_spans(pasts: Sequence[int], queries: Sequence[int]) -> list[Span]:
    spans, query, key = [], 0, 0
    for past, count in zip(pasts, queries, strict=True):
        spans.append(Span(query, count, key, past + count))
        query += count
        key += past + count
    return spans


def _bucket_spans(spans: list[Span]) -> list[list[Span]]:
    buckets: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        buckets[max(_SHORT, 1 << (span.keys - 1).bit_length())].append(span)
    return list(buckets.values())


def _make_group(spans: list[Span], start: int, device: torch.device) -> tuple[Group, Tensor]:
    """Return the group and the [size * length] positions in the packed keys that it gathers."""
    if len(spans) == 1:  # all its keys, without padding
        (span,) = spans
        rows = torch.tensor([span.query], device=device)
        pick = torch.arange(span.key, span.key + span.keys, device=device)
        return Group(rows, start, 1, span.keys, None), pick
    length = -(-max(span.keys for span in spans) // _ALIGN) * _ALIGN
    first, count, rows = torch.tensor(
        [[span.key, span.keys, span.query] for span in spans], device=device
    ).unbind(1)
    offsets = torch.arange(length, device=device)
    mask = offsets < count.unsqueeze(1)
    # Padding reads the request's own last key again, which is a valid page, and is masked.
    pick = first.unsqueeze(1) + torch.minimum(offsets, count.unsqueeze(1) - 1)
    group = Group(rows, start, len(spans), length, mask[:, None, None, :])
    return group, pick.flatten()


def _causal_mask(span: Span, device: torch.device) -> Tensor | None:
    if span.queries == span.keys:
        return None
    last = torch.arange(span.keys - span.queries, span.keys, device=device)
    return torch.arange(span.keys, device=device) <= last.unsqueeze(1)


@torch.no_grad()
def has_packed_kernel(heads: int, kv_heads: int, width: int, like: Tensor) -> bool:
    """Return whether the kernel for packed sequences agrees with the other way on this device.

    `like` has the device and the dtype of the states.
    """
    if like.device.type != "cuda" or like.dtype not in (torch.float16, torch.bfloat16):
        return False
    pasts, queries = [0, 70, 33, 5], [40, 1, 65, 9]
    made = torch.Generator(like.device).manual_seed(7)

    def draw_tensor(tokens: int, count: int) -> Tensor:
        size = (tokens, count, width)
        return torch.randn(size, generator=made, device=like.device, dtype=like.dtype)

    query, tokens = draw_tensor(sum(queries), heads), sum(pasts) + sum(queries)
    keys, values = draw_tensor(tokens, kv_heads), draw_tensor(tokens, kv_heads)
    try:
        found = Packed.build(pasts, queries, like.device).attend(query, keys, values, None)
    except (RuntimeError, TypeError, AttributeError) as error:  # not built in, other arguments
        log.info("packed_attention_unavailable", reason=describe_error(error))
        return False
    layout = Layout.build(pasts, queries, like.device)
    gather = slice(None) if layout.gather is None else layout.gather
    expected = _attend_apart(layout, query, keys[gather], values[gather], None)
    error_share = float((found - expected).float().norm() / expected.float().norm())
    return error_share <= _TOLERANCE


# ---------------------------------------------------------------- in every layer


def compute_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement the library's attention interface for packed states [1, heads, tokens, width].

    Returns [1, tokens, heads, width].
    """
    _refuse_unsupported(kwargs)
    if isinstance(cache.layout, DecodeStep | ChunkStep):  # of servekit's own steps
        layer: Any = module.layer_idx
        return cache.layout.attend(layer, query, key, value, scaling), None
    layout: Layout = cache.layout
    keys, values = _exchange_states(cache, key, value, module.layer_idx, layout, kwargs)
    packed = query[0].transpose(0, 1)
    if layout.packed is not None:
        return layout.packed.attend(packed, keys, values, scaling).unsqueeze(0), None
    return _attend_apart(layout, packed, keys, values, scaling).unsqueeze(0), None


def _attend_apart(
    layout: Layout, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """Attend group by group and chunk by chunk: [tokens, heads, width]."""
    if len(layout.groups) == 1 and not layout.chunks:  # the whole batch, in its order
        return _attend_decoding(layout.groups[0], query, keys, values, scaling)
    out = query.new_empty(*query.shape[:2], values.shape[-1])
    for group in layout.groups:
        out[group.rows] = _attend_decoding(group, query[group.rows], keys, values, scaling)
    for chunk in layout.chunks:
        span = chunk.span
        where = slice(span.query, span.query + span.queries)
        out[where] = _attend_chunk(chunk, query[where], keys, values, scaling)
    return out


def _attend_decoding(
    group: Group, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """Attend with one query per request, [size, heads, width].

    Heads that share keys become additional queries.
    """
    stop = group.start + group.size * group.length
    shape = (group.size, group.length, *keys.shape[1:])
    key, value = (
        states[group.start : stop].view(*shape[:3], -1).transpose(1, 2) for states in (keys, values)
    )
    shared = query.view(group.size, keys.shape[1], -1, query.shape[-1])
    out = scaled_dot_product_attention(
        shared, key, value, attn_mask=group.bias(query), scale=scaling
    )
    return out.reshape(group.size, query.shape[1], -1)


def _attend_chunk(
    chunk: Chunk, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
) -> Tensor:
    """Attend with several queries of one request, [queries, heads, width]."""
    span = chunk.span
    repeats = query.shape[1] // keys.shape[1]
    key, value = (
        states[span.key : span.key + span.keys].transpose(0, 1).repeat_interleave(repeats, 0)[None]
        for states in (keys, values)
    )
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key,
        value,
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        scale=scaling,
    )
    return out[0].transpose(0, 1)


def _exchange_states(
    cache: Any, key: Tensor, value: Tensor, layer: Any, layout: Layout, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Write the new keys and values, and read the gathered ones: [n, kv heads, width]."""
    read = layout.read_index(kwargs["read_index"][0])
    if hasattr(cache, "layer_to_allocator"):  # from 5.2x on
        states = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        allocator = cache.layer_to_allocator[layer]
        read_back = allocator.update(*states, layer, read, kwargs["write_index"][0])
    else:
        read_back = cache.update(key, value, layer, [read], kwargs["write_index"])
    keys, values = read_back
    return keys, values


def attend_eagerly(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Call the model's own eager attention, over the whole packed batch.

    The library's attention lacks features of some models, such as Gemma 2's soft cap. It is used
    for models without an own function, and only if they need none of these features.
    """
    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    library: Any = eager_paged_attention_forward
    if own is None:
        _refuse_unsupported(kwargs)
        return library(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, scaling, cache=cache, **kwargs
        )
    layer: Any = module.layer_idx
    if cache is None:  # from 5.24 on the layer itself has called its cache
        keys, values = key, value
    elif hasattr(cache, "layer_to_allocator"):  # from 5.2x on
        keys, values = cache.update(key, value, layer, kwargs)
    else:
        read = cache.update(key, value, layer, kwargs["read_index"], kwargs["write_index"])
        keys, values = (states.transpose(0, 1).unsqueeze(0) for states in read)
    if isinstance(attention_mask, dict):
        windowed = getattr(module, "sliding_window", 1) not in (1, None)
        attention_mask = attention_mask["sliding_attention" if windowed else "full_attention"]
    extra = {name: kwargs[name] for name in _UNSUPPORTED if name in kwargs}
    return own(  # type: ignore[no-any-return]
        module, query, keys, values, attention_mask, scaling=scaling, dropout=dropout, **extra
    )


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")


AttentionInterface.register(NAME, compute_attention)
AttentionInterface.register(_EAGER, attend_eagerly)


def has_full_attention(config: Any) -> bool:
    """Return whether every layer has full attention, as sdpa would compute it."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return getattr(config, "sliding_window", None) is None
    return set(types) == {"full_attention"}
