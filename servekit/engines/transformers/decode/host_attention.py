"""Attention of a decode step in plain torch, laid out on the host: for CPUs.

A kernel for GPUs has one query per request, and reads the keys of each. Here requests of similar
length and with equally many queries are one product, and a request's keys are read once for all its
queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Requests shorter than this are one group, whatever their lengths.
_SHORT = 128


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Requests with equally many queries, side by side."""

    queries: Tensor  # [requests, queries], their places in the batch
    index: Tensor  # [requests, longest] into the tokens of all pages
    mask: Tensor | None  # [requests, queries, longest], true where there is a key; None: everywhere


def group_queries(
    table: Tensor, lengths: Sequence[int], spans: Sequence[int], size: int
) -> list[QueryGroup]:
    """Group the queries of a step over pages of `size` tokens.

    `table` [queries, pages] and `lengths` are as a kernel has them (see `kernels`); `spans` are the
    numbers of adjacent queries that belong to one request, each a token longer than the one before.
    """
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    first = 0
    for count in spans:
        longest = lengths[first + count - 1]
        buckets[count, max(_SHORT, 1 << (longest - 1).bit_length())].append(first)
        first += count
    made = []
    whole = torch.tensor(lengths, device=table.device)
    for (count, _), starts in buckets.items():
        firsts = torch.tensor(starts, device=table.device)
        queries = firsts.unsqueeze(1) + torch.arange(count, device=table.device)
        last = whole[queries[:, -1:]]
        offsets = torch.arange(int(last.max()), device=table.device)
        # Memory beyond the end is unwritten, possibly NaN: the last token is read again instead.
        at = torch.minimum(offsets, last - 1)
        index = table[firsts].gather(1, at // size) * size + at % size
        mask = None if count == len(starts) == 1 else offsets < whole[queries].unsqueeze(-1)
        made.append(QueryGroup(queries, index, mask))
    return made


def attend_groups(
    groups: Sequence[QueryGroup], query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Attend as a kernel does: [queries, heads, width]."""
    out = torch.empty_like(query)
    kv_heads, width = keys.shape[2:]
    for group in groups:
        requests, count = group.queries.shape
        key, value = (s.flatten(0, 1)[group.index].transpose(1, 2) for s in (keys, values))
        # Heads that share keys become additional queries.
        asked = query[group.queries.flatten()].view(requests, count, kv_heads, -1, width)
        share = asked.shape[3]
        asked = asked.transpose(1, 2).flatten(2, 3)
        mask = group.mask
        if mask is not None:
            mask = mask.repeat_interleave(share, 1).unsqueeze(1)
        found = torch.nn.functional.scaled_dot_product_attention(
            asked, key, value, attn_mask=mask, scale=scale
        )
        found = found.view(requests, kv_heads, count, share, width).transpose(1, 2)
        out[group.queries.flatten()] = found.reshape(requests * count, -1, width)
    return out
