"""Zeros that take no memory before they are written to, for the KV cache on a CPU.

`torch.zeros` writes every page of what it makes. A cache is sized for the most that its slots could
use, so that took a third of a small model's load, and memory that most workers never need. The
kernel hands out pages that are zero, each at its first use, and takes them all back when the tensor
goes. A mapping of its own, as `calloc` would take what is free in the heap, and write that.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Smaller tensors are made as ever.
LEAST_BYTES = 2**20


class LazyZeros(TorchFunctionMode):
    """While it is entered, in this thread, large flat tensors of zero bytes on a CPU are lazy."""

    def __torch_function__(  # type: ignore[no-untyped-def]
        self,
        func: Callable[..., Any],
        types,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and _suits(args, kwargs):
            return torch.frombuffer(_pages(args[0]), dtype=torch.uint8)  # which keeps the mapping
        return func(*args, **kwargs)


def _pages(size_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)  # as NumPy does: fewer faults, and quicker attention
    return pages


def _suits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) != 1 or not isinstance(args[0], int) or args[0] < LEAST_BYTES:
        return False
    if kwargs.keys() - {"dtype", "device"} or kwargs.get("dtype") is not torch.uint8:
        return False
    return torch.device(kwargs.get("device") or "cpu").type == "cpu"
