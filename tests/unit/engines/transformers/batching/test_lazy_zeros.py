"""Zeros that are made at their first use, and only those that a cache on a CPU is made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from servekit.engines.transformers.batching.batch_processor import LEAST_LAZY_BYTES, LazyZeros

SIZE_BYTES = 256 * 2**20


def resident_bytes() -> int:
    found = re.search(r"^Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.lane("long")
def test_they_take_memory_as_they_are_written() -> None:
    before = resident_bytes()
    with LazyZeros():
        made = torch.zeros(SIZE_BYTES, dtype=torch.uint8, device=torch.device("cpu"))
    assert resident_bytes() - before < SIZE_BYTES / 8
    assert not made[:: 2**20].any()
    made[: SIZE_BYTES // 2] = 1
    assert resident_bytes() - before > SIZE_BYTES / 4
    assert made.view(torch.float32).shape == (SIZE_BYTES // 4,)
    assert int(made.sum()) == SIZE_BYTES // 2


def test_all_else_is_made_as_ever() -> None:
    with LazyZeros():
        assert torch.zeros(2, 3).shape == (2, 3)
        assert torch.zeros(LEAST_LAZY_BYTES, dtype=torch.float32).dtype == torch.float32
        assert torch.zeros((LEAST_LAZY_BYTES,), dtype=torch.uint8).shape == (LEAST_LAZY_BYTES,)
        assert torch.zeros(LEAST_LAZY_BYTES, dtype=torch.uint8, device="meta").device.type == "meta"
        assert torch.zeros(4, dtype=torch.uint8).untyped_storage().resizable()
    assert torch.zeros(LEAST_LAZY_BYTES, dtype=torch.uint8).untyped_storage().resizable()
