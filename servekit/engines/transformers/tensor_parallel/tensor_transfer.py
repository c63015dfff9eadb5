"""Transfer of a forward pass's arguments from rank 0 to the other ranks.

Plain values and the shapes of tensors are sent as a message; the tensors are joined in one piece of
device memory and broadcast. Caches are not sent: each rank has its own, and is told which one to
use. For an empty one it creates its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from servekit.engines.transformers.batching.paged_attention import Layout
from servekit.engines.transformers.tensor_parallel.messages import TensorForm

#: Alignment for a tensor of any dtype.
_ALIGN_BYTES = 16
#: The library's sampling arguments, which no model reads.
_NOT_SENT = {"logits_processor_args"}


def pack_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], list[Tensor]]:
    """Return the arguments as a message, and the tensors that go with it.

    Raises TypeError for a value that can be sent in neither way.
    """
    tensors: list[Tensor] = []
    kept = {name: value for name, value in kwargs.items() if name not in _NOT_SENT}
    return [_pack_value(list(args), tensors), _pack_value(kept, tensors)], tensors


def _pack_value(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": {name: _pack_value(item, tensors) for name, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_pack_value(item, tensors) for item in value]
    if isinstance(value, Cache):
        return None if _is_empty(value) else {"past": True}
    if hasattr(value, "layout"):
        layout: Layout | None = value.layout
        return {"pages": None if layout is None else [layout.pasts, layout.queries]}
    raise TypeError(
        f"a forward pass takes a {type(value).__name__}, which is neither a tensor nor a cache"
    )


def _is_empty(cache: Cache) -> bool:
    """Return whether no token is in a cache. Layers of a recurrent model have no length."""
    sized = [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]
    if cache.layers and not sized:
        return False
    return not any(layer.get_seq_length() for layer in sized)


def unpack_value(packed: Any, tensors: Sequence[Tensor], past: Any, pages: Any) -> Any:
    """Return the arguments, with this rank's `past` and `pages` in place of caches."""
    if isinstance(packed, list):
        return [unpack_value(item, tensors, past, pages) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {name: unpack_value(item, tensors, past, pages) for name, item in value.items()}
    if kind == "past":
        return past
    pages.layout = None if value is None else Layout.build(value[0], value[1], pages.device)
    return pages


# ---------------------------------------------------------------- tensors in one broadcast


def tensor_forms(tensors: Sequence[Tensor]) -> tuple[TensorForm, ...]:
    return tuple(
        TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for tensor in tensors
    )


def count_buffer_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(_align_length(tensor.numel() * tensor.element_size()) for tensor in tensors)


def join_tensors(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return all tensors joined, uint8 [size_bytes]."""
    whole = torch.empty(count_buffer_bytes(tensors), dtype=torch.uint8, device=device)
    at = 0
    for tensor in tensors:
        flat = tensor.to(device).reshape(-1).view(torch.uint8)
        whole[at : at + len(flat)] = flat
        at += _align_length(len(flat))
    return whole


def split_tensors(whole: Tensor, shapes: Sequence[TensorForm]) -> list[Tensor]:
    """Return views of `join_tensors`' result, with the original dtypes and shapes."""
    tensors, at = [], 0
    for form in shapes:
        dtype: torch.dtype = getattr(torch, form.dtype)
        length = dtype.itemsize
        for count in form.shape:
            length *= count
        tensors.append(whole[at : at + length].view(dtype).view(form.shape))
        at += _align_length(length)
    return tensors


def _align_length(length: int) -> int:
    return -(-length // _ALIGN_BYTES) * _ALIGN_BYTES
