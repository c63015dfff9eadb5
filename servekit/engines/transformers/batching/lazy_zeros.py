"""Zero tensors that take no memory before they are written to, for the KV cache on a CPU.

`torch.zeros` writes every page of its memory. A cache is sized for the maximum that its slots could
use, so this took a large part of a small model's load time, and memory that most workers never
need. With a mapping, the kernel provides zero pages at their first use, and takes all back with the
tensor. `calloc` would not do, since it may reuse free heap memory and write zeros to it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

#: Smaller tensors are created as usual.
LEAST_BYTES = 2**20


class LazyZeros(TorchFunctionMode):
    """A context in which large flat byte tensors of zeros on a CPU are lazy, in this thread."""

    def __torch_function__(  # type: ignore[no-untyped-def]
        self,
        func: Callable[..., Any],
        types,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and _suits(args, kwargs):
            return torch.frombuffer(_pages(args[0]), dtype=torch.uint8)  # keeps the mapping alive
        return func(*args, **kwargs)


def _pages(size_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)  # as in NumPy: fewer page faults, and faster attention
    return pages


def _suits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if len(args) != 1 or not isinstance(args[0], int) or args[0] < LEAST_BYTES:
        return False
    if kwargs.keys() - {"dtype", "device"} or kwargs.get("dtype") is not torch.uint8:
        return False
    return torch.device(kwargs.get("device") or "cpu").type == "cpu"
