"""Paged attention of one query per request: the choice of a kernel, and their common interface.

A kernel is called as

    kernel(query, keys, values, table, lengths, scale) -> [requests, heads, width]

    query    [requests, heads, width]
    keys     [pages, page size, kv heads, width]; values alike
    table    [requests, pages of a request], int32: page i has the tokens from i x size on
    lengths  [requests], int32: number of tokens, including this step's; never 0

without waiting for the device, so that a CUDA graph can record it. Besides our own kernel (Triton
comes with torch) there are those of packages, with these requirements:

    flash-attn-4   `flash_attn.cute`; needs nvidia-cutlass-dsl, and compiles at its first call
    FlashAttention-3 (`flash_attn_interface`) built from source. `fa3-fwd` has no paged cache.
    flash-attn     FlashAttention-2: page size a multiple of 256 tokens; a source package
    torch          `torch.nn.attention.varlen` with `block_table`; the page sizes of flash-attn

The chosen kernel must agree with `reference_attention` when it is chosen: `check_kernel`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.transformers.batching import kv_cache
from servekit.errors import describe_error
from servekit.protocol.messages import WorkerSpec

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]

#: FlashAttention-2's page size is a multiple of this number of tokens.
_FLASH2_PAGE = 256
#: Relative error of rounding; a wrong page exceeds it by far.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel; `captured` if a CUDA graph can record it."""

    name: str
    attend: Attend
    captured: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a kernel's task."""

    heads: int
    kv_heads: int
    width: int
    page_size: int
    dtype: torch.dtype
    device: torch.device


def choose_for_model(model: PreTrainedModel, spec: WorkerSpec, block_size: int) -> Kernel:
    """Return the kernel for a model's steps, as the options or "auto" say. Raises LookupError."""
    own = kv_cache.shape_of(model.config.get_text_config(), model.dtype.itemsize)
    named = spec.options.get("decode_attention") or "auto"
    if model.device.type != "cuda" and named == "auto":
        named = "reference"
    sizes = own.heads, own.kv_heads, own.head_dim, block_size
    return choose_kernel(named, Shape(*sizes, model.dtype, model.device))


def choose_kernel(kernel_name: str, shape: Shape) -> Kernel:
    """Return the requested kernel, or with "auto" the first that works here.

    Raises LookupError with the reason if there is none.
    """
    if kernel_name != "auto":
        return _try_kernel(kernel_name, shape)
    reasons = []
    for name in ("flash4", "flash3", "triton", "flash2", "torch"):
        try:
            return _try_kernel(name, shape)
        except LookupError as error:
            reasons.append(str(error))
    raise LookupError("; ".join(reasons))


def _try_kernel(name: str, shape: Shape) -> Kernel:
    try:
        kernel = MAKERS[name](shape)
        if kernel.captured:
            check_kernel(kernel, shape)
    except Exception as error:  # a compiler's own error, a missing symbol: any failure excludes it
        raise LookupError(f"{name}: {describe_error(error)}"[:300]) from error
    return kernel


@torch.no_grad()
def check_kernel(kernel: Kernel, shape: Shape) -> None:
    """Raise ValueError unless the kernel agrees with `reference_attention` for all lengths."""
    size = shape.page_size
    lengths = [1, size, size + 1, 3 * size - 1, 777, 2050]
    case = make_example(shape, lengths)
    found, expected = kernel.attend(*case).float(), reference_attention(*case).float()
    error = float((found - expected).norm() / expected.norm())
    if not error <= _TOLERANCE.get(shape.dtype, _HALF_TOLERANCE):  # NaN is no agreement
        raise ValueError(f"its attention is off by {error:.1%}")


def make_example(
    shape: Shape, lengths: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Any]:
    """Return random arguments for a kernel, with requests of these lengths on scattered pages."""
    made = torch.Generator().manual_seed(7)
    size = shape.page_size
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=made)  # the last page stays unused
    table = order[-1].repeat(len(lengths), max(counts) + 1)
    for row, (page, own) in enumerate(zip(table, counts, strict=True)):
        first = sum(counts[:row])
        page[:own] = order[first : first + own]
    draw = partial(torch.randn, generator=made)
    pages = (len(order), size, shape.kv_heads, shape.width)
    states = [draw(len(lengths), shape.heads, shape.width), draw(*pages), draw(*pages)]
    for tokens in states[1:]:  # unwritten memory may hold anything
        tokens[order[-1]] = torch.nan
        for row, length in zip(table, lengths, strict=True):
            tokens[row[(length - 1) // size], (length - 1) % size + 1 :] = torch.nan
    query, keys, values = (state.to(shape.device, shape.dtype) for state in states)
    whole = torch.tensor(lengths, dtype=torch.int32, device=shape.device)
    return query, keys, values, table.to(shape.device, torch.int32), whole, shape.width**-0.5


# ---------------------------------------------------------------- without a package


def reference_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Compute in plain torch, on any device; waits for the device to learn the longest length."""
    size = keys.shape[1]
    offsets = torch.arange(-(-int(lengths.max()) // size) * size, device=query.device)
    whole = lengths.unsqueeze(1)
    # Memory beyond the end is unwritten, possibly NaN: the last token is read again instead.
    at = torch.minimum(offsets, whole - 1)
    index = table.gather(1, at // size) * size + at % size
    key, value = (states.flatten(0, 1)[index].transpose(1, 2) for states in (keys, values))
    shared = query.view(len(query), keys.shape[2], -1, query.shape[-1])
    mask = (offsets < whole)[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=mask, scale=scale
    )
    return out.reshape(query.shape[0], query.shape[1], -1)


def _make_reference(shape: Shape) -> Kernel:
    return Kernel("reference", reference_attention, captured=False)


def _make_triton(shape: Shape) -> Kernel:
    if shape.device.type != "cuda":
        raise LookupError("Triton runs on a GPU only")
    from servekit.engines.transformers.decode import paged_triton

    return Kernel("triton", paged_triton.compute_paged_attention)


# ---------------------------------------------------------------- from packages


def _make_torch(shape: Shape) -> Kernel:
    varlen: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if "block_table" not in inspect.signature(varlen).parameters:
        raise LookupError(f"torch {torch.__version__} has no paged attention")
    _need_big_pages(shape)

    def attend_torch(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        longest = table.shape[1] * keys.shape[1]
        out: Tensor = varlen(
            *(query, keys, values, starts, None, 1, longest),
            scale=scale,
            enable_gqa=True,
            seqused_k=lengths,
            block_table=table,
        )
        return out

    return Kernel("torch", attend_torch)


def _make_flash2(shape: Shape) -> Kernel:
    _need_big_pages(shape)
    return _with_cache("flash2", "flash_attn", "block_table")


def _make_flash3(shape: Shape) -> Kernel:
    return _with_cache("flash3", "flash_attn_interface", "page_table")


def _with_cache(name: str, module: str, table_argument: str) -> Kernel:
    """Return the kernel `flash_attn_with_kvcache` of FlashAttention 2 or 3."""
    if find_spec(module) is None:
        raise LookupError(f"{module} is not installed")
    with_cache: Any = importlib.import_module(module).flash_attn_with_kvcache

    def attend_with_cache(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        out: Tensor = with_cache(
            *(query.unsqueeze(1), keys, values),
            cache_seqlens=lengths,
            softmax_scale=scale,
            causal=True,
            **{table_argument: table},
        )
        return out.squeeze(1)

    return Kernel(name, attend_with_cache)


def _make_flash4(shape: Shape) -> Kernel:
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        raise LookupError("flash-attn-4 is not installed")
    varlen: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def attend_flash(
        query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float
    ) -> Tensor:
        out = varlen(
            *(query.unsqueeze(1), keys, values),
            seqused_k=lengths,
            page_table=table,
            softmax_scale=scale,
            causal=True,
        )
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first.view(query.shape)

    return Kernel("flash4", attend_flash)


def _need_big_pages(shape: Shape) -> None:
    if shape.page_size % _FLASH2_PAGE:
        raise LookupError(f"it needs block_size: {_FLASH2_PAGE}")


MAKERS: dict[str, Callable[[Shape], Kernel]] = {
    "reference": _make_reference,
    "triton": _make_triton,
    "torch": _make_torch,
    "flash2": _make_flash2,
    "flash3": _make_flash3,
    "flash4": _make_flash4,
}
