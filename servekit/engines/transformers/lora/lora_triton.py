"""The additions of many adapters to one layer's output, in two Triton kernels, for decode steps.

Each token has its own adapter. The kernels read the addresses of an adapter's factors from a table,
so that a CUDA graph that was recorded with other adapters can be replayed:

    table    [adapters + 1, 3] int64: addresses of `down` [rank, in] and `up` [rank, out], and rank
    numbers  [tokens] int64: the row of the table; row 0 has rank 0, for tokens without an adapter

`_shrink` multiplies a stretch of a token's input by `down`; `_expand` adds up the stretches,
multiplies them by `up`, and adds the result to a stretch of the token's output.

They compile at their first call, and run on the CPU under TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers of a factor that a program of `_shrink` multiplies at a time.
_TILE = 4096
#: Programs that share the input of one token, at most, and of all tokens.
_MOST_SPLITS = 8
_PROGRAMS = 1024
#: Stretch of a token's output that one program of `_expand` writes: with more warps to a stretch,
#: each of them loads the same products again. Of an H200's times of several shapes these are the
#: best: `_shrink` 2 to 11 µs and `_expand` 2 to 9, up to 128 tokens and layers of 12,288 wide.
_OUT = 512
_EXPAND_WARPS = 2
_SHRINK_WARPS = 8
#: Address alignment of factors whose rows are multiples of it, bytes.
_ALIGNED = 16
_LEAST_RANKS = 16
#: Relative error of rounding to 16 bits; a wrong product exceeds it by far.
_TOLERANCE = 1e-2


@triton.jit  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x,
    table,
    numbers,
    like,
    hidden,
    width,
    stretch,
    number_stride,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    entry = table + tl.load(numbers + token * number_stride) * 3
    rank = tl.load(entry + 2)
    if rank > 0:
        down = tl.load(entry).to(like.dtype)
        if ALIGNED:
            down = tl.multiple_of(down, 16)
        ranks = tl.arange(0, RANKS)
        real = ranks < rank
        total = tl.zeros([RANKS], tl.float32)
        last = tl.minimum((split + 1) * stretch, width)
        for start in range(split * stretch, last, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < last
            state = tl.load(x + token * width + column, mask=inside, other=0.0).to(tl.float32)
            place = down + ranks[:, None] * width + column[None, :]
            factor = tl.load(place, mask=real[:, None] & inside[None, :], other=0.0)
            total += tl.sum(factor.to(tl.float32) * state[None, :], axis=1)
        tl.store(hidden + (token * tl.num_programs(1) + split) * RANKS + ranks, total)


@triton.jit  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    hidden,
    table,
    numbers,
    like,
    out,
    width,
    number_stride,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    entry = table + tl.load(numbers + token * number_stride) * 3
    rank = tl.load(entry + 2)
    if rank > 0:
        up = tl.load(entry + 1).to(like.dtype)
        if ALIGNED:
            up = tl.multiple_of(up, 16)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        split = tl.arange(0, SPLITS)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, rank, STEP):
            ranks = first + tl.arange(0, STEP)
            part = hidden + (token * SPLITS + split[:, None]) * RANKS + ranks[None, :]
            state = tl.sum(tl.load(part), axis=0)
            place = up + ranks[:, None] * width + column[None, :]
            factor = tl.load(place, mask=(ranks < rank)[:, None] & inside[None, :], other=0.0)
            total += tl.sum(factor.to(tl.float32) * state[:, None], axis=0)
        here = out + token * width + column
        before = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        tl.store(here, (before + total).to(out.dtype.element_ty), mask=inside)


class Entries(NamedTuple):
    """The adapters of a step's tokens on one layer: `table` and `numbers` as above.

    `ranks` is a power of two from 16 on, and at least the largest rank in the table; `like` has the
    factors' dtype.
    """

    table: Tensor
    numbers: Tensor
    ranks: int
    like: Tensor

    def is_aligned(self, width: int) -> bool:
        return width * self.like.element_size() % _ALIGNED == 0


def make_hidden(x: Tensor, entries: Entries) -> Tensor:
    """Return memory for `shrink_states`, float32 [tokens, splits, ranks]."""
    tokens, width = x.shape
    splits = min(_MOST_SPLITS, _PROGRAMS // tokens, -(-width * entries.ranks // _TILE))
    splits = 1 << max(0, splits.bit_length() - 1)
    return torch.empty((tokens, splits, entries.ranks), dtype=torch.float32, device=x.device)


def shrink_states(x: Tensor, entries: Entries, hidden: Tensor) -> None:
    """Multiply the states `x` [tokens, in], contiguous, by the factors `down`, into `hidden`."""
    width = x.shape[1]
    tokens, splits, ranks = hidden.shape
    block = max(_LEAST_RANKS, _TILE // ranks)
    stretch = block * -(-width // (block * splits))
    grid: Any = (tokens, splits)
    _shrink[grid](
        *(x, entries.table, entries.numbers, entries.like, hidden, width, stretch),
        entries.numbers.stride(0),
        RANKS=ranks,
        BLOCK=block,
        ALIGNED=entries.is_aligned(width),
        num_warps=_SHRINK_WARPS,
    )


def add_expanded(hidden: Tensor, entries: Entries, out: Tensor) -> None:
    """Add the products of `hidden` and the factors `up` to `out` [tokens, out], contiguous."""
    tokens, width = out.shape
    grid: Any = (tokens, -(-width // _OUT))
    _expand[grid](
        *(hidden, entries.table, entries.numbers, entries.like, out, width),
        entries.numbers.stride(0),
        RANKS=hidden.shape[2],
        SPLITS=hidden.shape[1],
        BLOCK=_OUT,
        STEP=_LEAST_RANKS,
        ALIGNED=entries.is_aligned(width),
        num_warps=_EXPAND_WARPS,
    )


@torch.no_grad()
def check_products(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError unless the kernels agree with torch, for several ranks and widths."""
    made = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).to(device, dtype)

    for wide, width, ranks in ((96, 320, (4, 16)), (1000, 70, (40, 64)), (4096, 512, (7,))):
        factors = [(draw(rank, wide), draw(rank, width)) for rank in ranks]
        entries = [(down.data_ptr(), up.data_ptr(), len(down)) for down, up in factors]
        table = torch.tensor([(0, 0, 0), *entries], device=device)
        numbers = [at % len(table) for at in range(9)]
        x, out = draw(len(numbers), wide), draw(len(numbers), width)
        expected = out.float()
        for token, number in enumerate(numbers):
            if number:
                down, up = (one.float() for one in factors[number - 1])
                expected[token] += x[token].float() @ down.T @ up
        columns = torch.tensor([[number, -1] for number in numbers], device=device)
        shared = Entries(table, columns[:, 0], max(16, *ranks), factors[0][0])
        hidden = make_hidden(x, shared)
        shrink_states(x, shared, hidden)
        add_expanded(hidden, shared, out)
        error = float((out.float() - expected).norm() / expected.norm())
        if not error <= _TOLERANCE:  # NaN is no agreement
            raise ValueError(f"its products are off by {error:.1%}")
