"""Paged attention in Triton: one query per request, split over its context.

One program reads a stretch of one request's keys for one kv head, and serves all query heads that
share them, so keys and values are read from memory once. Reading them dominates a step's time, so
stretches are short enough to keep the whole GPU busy when requests are few or one is long; `_merge`
then combines the results of the stretches. With one stretch per request it is not needed.

It compiles at its first call, and runs on the CPU under TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Keys that a program processes at a time.
_KEYS = 64
#: Programs that keep a big GPU busy: several per multiprocessor.
_PROGRAMS = 1024
#: Minimum number of splits, as a long request among short ones must still be split.
_LEAST_SPLITS = 4
_MOST_SPLITS = 32
#: Minimum length of a stretch, except the last.
_STRETCH = 256
#: Maximum size of a key for staging: several tiles of wider ones do not fit in shared memory.
_STAGED_BYTES = 512
_LEAST_ROWS = 16  # of a tile, for tensor cores


@triton.jit  # type: ignore[untyped-decorator]
def _stretch(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    table,
    lengths,
    out,
    peak,
    total,
    scale,
    query_stride,
    page_stride,
    token_stride,
    head_stride,
    value_page_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    STRETCH: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1) * SHARE

    length = tl.load(lengths + request)
    # A whole number of tiles, as near to an equal share as possible.
    share = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    share = tl.maximum(share, STRETCH)
    first = split * share
    last = tl.minimum(first + share, length)

    row = tl.arange(0, ROWS)
    lane = tl.arange(0, PADDED)
    offset = tl.arange(0, KEYS)
    real = row < SHARE
    wide = lane < WIDTH

    own = query + request.to(tl.int64) * query_stride + (head * SHARE + row)[:, None] * WIDTH
    q = tl.load(own + lane[None, :], mask=real[:, None] & wide[None, :], other=0.0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, PADDED], tl.float32)
    pages = table + request.to(tl.int64) * table_stride

    for start in range(first, last, KEYS):
        at = start + offset
        there = at < last
        page = tl.load(pages + at // PAGE, mask=there, other=0).to(tl.int64)
        key_at = page * page_stride + (at % PAGE) * token_stride + head * head_stride
        k = tl.load(
            keys + key_at[None, :] + lane[:, None], mask=there[None, :] & wide[:, None], other=0.0
        )
        # "ieee" is for float32, which would otherwise lose half its digits.
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(there[None, :], score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(best - higher)
        value_at = page * value_page_stride
        value_at += (at % PAGE) * value_token_stride + head * value_head_stride
        v = tl.load(
            values + value_at[:, None] + lane[None, :],
            mask=there[:, None] & wide[None, :],
            other=0.0,
        )
        part = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        found = found * fade[:, None] + part
        mass = mass * fade + tl.sum(weight, 1)
        best = higher

    # [request, head, split]
    place = (request * heads + head * SHARE + row).to(tl.int64) * SPLITS + split
    if SPLITS == 1:
        found = found / mass[:, None]
    else:
        tl.store(peak + place, best, mask=real)
        tl.store(total + place, mass, mask=real)
    tl.store(
        out + place[:, None] * WIDTH + lane[None, :],
        found.to(out.dtype.element_ty),
        mask=real[:, None] & wide[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    parts, peak, total, out, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    lane = tl.arange(0, PADDED)
    wide = lane < WIDTH
    best = tl.load(peak + row * SPLITS + split)
    fade = tl.exp(best - tl.max(best, 0))  # 0 for a stretch beyond the request's end
    mass = tl.sum(tl.load(total + row * SPLITS + split) * fade, 0)
    where = (row * SPLITS + split)[:, None] * WIDTH + lane[None, :]
    part = tl.load(parts + where, mask=wide[None, :], other=0.0)
    whole = tl.sum(part * fade[:, None], 0) / mass
    tl.store(out + row * WIDTH + lane, whole.to(out.dtype.element_ty), mask=wide)


def splits_of(requests: int, kv_heads: int, longest: int) -> int:
    """Return the number of stretches per request; `longest` is a request's maximum token count."""
    wanted = triton.next_power_of_2(max(1, _PROGRAMS // (requests * kv_heads)))
    useful = triton.next_power_of_2(max(1, -(-longest // _STRETCH)))
    return int(min(max(wanted, _LEAST_SPLITS), _MOST_SPLITS, useful))


def compute_paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Compute paged attention; see `kernels` for the arguments."""
    requests, heads, width = query.shape
    size, kv_heads = keys.shape[1], keys.shape[2]
    query = query.contiguous()
    if keys.stride(-1) != 1 or values.stride(-1) != 1 or table.stride(-1) != 1:
        raise ValueError("the innermost dimension has to be contiguous")
    splits = splits_of(requests, kv_heads, table.shape[1] * size)
    out = torch.empty_like(query)
    parts, marks = out, out  # unused with a single stretch
    if splits > 1:
        parts = torch.empty(
            (requests, heads, splits, width), dtype=torch.float32, device=out.device
        )
        marks = torch.empty((2, requests, heads, splits), dtype=torch.float32, device=out.device)
    padded = max(_LEAST_ROWS, triton.next_power_of_2(width))
    share = heads // kv_heads
    stretch: Any = _stretch
    stretch[(requests, kv_heads, splits)](
        *(query, keys, values, table, lengths, parts, marks[0], marks[1 if splits > 1 else 0]),
        *(scale, query.stride(0), *keys.stride()[:3], *values.stride()[:3], table.stride(0)),
        SHARE=share,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(share)),
        WIDTH=width,
        PADDED=padded,
        PAGE=size,
        KEYS=_KEYS,
        SPLITS=splits,
        STRETCH=_STRETCH,
        num_warps=4,
        num_stages=3 if padded * query.itemsize <= _STAGED_BYTES else 1,
    )
    if splits > 1:
        merge: Any = _merge
        merge[(requests * heads,)](
            *(parts, marks[0], marks[1], out), WIDTH=width, PADDED=padded, SPLITS=splits
        )
    return out
