"""Sizing the KV cache: what is available, cgroups included, and what the slots can use."""

from __future__ import annotations

import pytest

from servekit.engines.transformers.batching.kv_cache import (
    CachePlan,
    Shape,
    plan_cache,
)
from servekit.errors import LoadError

GIB = 2**30
MIB = 2**20
#: SmolLM2-135M in float32.
SMALL = Shape(layers=30, heads=9, kv_heads=3, head_dim=64, itemsize=4, hidden=576, vocab_size=49152)


def small_plan(available_bytes: int, **options: int | None) -> CachePlan:
    known = {"max_context": 8192, "block_size": 32}
    return plan_cache(SMALL, cuda=False, available_bytes=available_bytes, **known | options)  # type: ignore[arg-type]


def test_plenty_of_memory_is_not_wasted_on_a_cpu() -> None:
    rich = small_plan(500 * GIB)
    assert rich.slots == 32
    assert rich.tokens == 32 * 512
    assert rich.bytes == rich.tokens * SMALL.token_kv_bytes


def test_one_whole_context_fits_if_memory_allows() -> None:
    assert small_plan(50 * GIB, slots=2).tokens >= 8192


def test_little_memory_makes_a_small_cache() -> None:
    scarce = small_plan(GIB)
    assert 2 * 32 <= scarce.tokens < 8192
    assert scarce.bytes < GIB * 0.4


def test_no_memory_is_a_load_error_that_may_pass() -> None:
    with pytest.raises(LoadError, match="no room for a KV cache") as caught:
        small_plan(60 * MIB)
    assert not caught.value.permanent


def test_the_configured_size_is_kept() -> None:
    asked = small_plan(4 * GIB, cache_bytes=100 * MIB)
    assert 99 * MIB < asked.bytes <= 100 * MIB


def test_the_configured_size_must_be_there() -> None:
    with pytest.raises(LoadError, match=r"kv_cache_bytes asks for 2\.0 GiB"):
        small_plan(GIB, cache_bytes=2 * GIB)


def test_every_slot_gets_a_token_in_a_batch() -> None:
    assert small_plan(50 * GIB, slots=500, batch_tokens=64).slots == 64


def test_a_gpu_gives_the_slots_all_they_could_use_and_no_more() -> None:
    half = Shape(**{**{f: getattr(SMALL, f) for f in SMALL.__slots__}, "itemsize": 2})
    rich = plan_cache(half, cuda=True, available_bytes=900 * GIB, max_context=2048, block_size=32)
    assert rich.tokens == 256 * 2048
    scarce = plan_cache(half, cuda=True, available_bytes=8 * GIB, max_context=8192, block_size=32)
    assert 4 * GIB < scarce.bytes < 7 * GIB


def test_halving() -> None:
    whole = small_plan(50 * GIB)
    assert whole.halved(0) == whole
    assert whole.halved(1).blocks == whole.blocks // 2
    assert whole.halved(30).blocks == 2
