"""Rotary embeddings of queries and keys in one Triton kernel.

One program rotates one head of one token, rounding after each product as the formula in torch does.
It compiles at its first call, and runs on the CPU under TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    q,
    k,
    cos,
    sin,
    q_out,
    k_out,
    q_head,
    q_token,
    k_head,
    k_token,
    q_heads,
    heads,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, LANES)
    real = lane < HALF
    if head < q_heads:
        place = q + head * q_head + token * q_token + lane
        out = q_out + (token * q_heads + head) * 2 * HALF + lane
    else:
        place = k + (head - q_heads) * k_head + token * k_token + lane
        out = k_out + (token * (heads - q_heads) + head - q_heads) * 2 * HALF + lane
    first = tl.load(place, mask=real).to(tl.float32)
    last = tl.load(place + HALF, mask=real).to(tl.float32)
    angle = token * 2 * HALF + lane
    kind = q_out.dtype.element_ty
    cos_first = tl.load(cos + angle, mask=real).to(tl.float32)
    cos_last = tl.load(cos + angle + HALF, mask=real).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=real).to(tl.float32)
    sin_last = tl.load(sin + angle + HALF, mask=real).to(tl.float32)
    a = (first * cos_first).to(kind).to(tl.float32) - (last * sin_first).to(kind).to(tl.float32)
    b = (last * cos_last).to(kind).to(tl.float32) + (first * sin_last).to(kind).to(tl.float32)
    tl.store(out, a.to(kind), mask=real)
    tl.store(out + HALF, b.to(kind), mask=real)


def fits(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    """Return whether `rotate` can rotate these states: those of one packed batch on a GPU."""
    width = q.shape[-1]
    return (
        q.is_cuda
        and q.dim() == k.dim() == 4
        and q.shape[0] == k.shape[0] == 1
        and q.dtype == k.dtype == cos.dtype
        and q.stride(-1) == k.stride(-1) == 1
        and cos.shape == (1, q.shape[2], width)
        and width % 2 == 0
    )


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate states [1, heads, tokens, width] by angles [1, tokens, width].

    The result has the same shapes, with the heads of a token adjacent in memory.
    """
    _, q_heads, tokens, width = q.shape
    heads = q_heads + k.shape[1]
    rotated = [q.new_empty((1, tokens, one.shape[1], width)) for one in (q, k)]
    half = width // 2
    grid: Any = (tokens, heads)
    _rotate[grid](
        *(q, k, cos.contiguous(), sin.contiguous(), *rotated),
        *(q.stride(1), q.stride(2), k.stride(1), k.stride(2), q_heads, heads),
        HALF=half,
        LANES=triton.next_power_of_2(half),
    )
    return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)
