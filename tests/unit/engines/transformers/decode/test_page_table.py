"""Pages of a cache as decoding needs them, over made-up caches of both forms of the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from servekit.engines.transformers.decode.page_table import (
    ChunkStep,
    DecodeStep,
    Holder,
    Pages,
    hand_over,
)

SIZE, BLOCKS, HEADS, WIDTH = 4, 3, 2, 8


def old_cache(groups: int = 1) -> tuple[Any, Any]:
    """A cache of transformers 5.17: a tensor for each layer."""
    layers = [torch.arange(BLOCKS * SIZE * HEADS * WIDTH).float().view(-1, HEADS, WIDTH)] * 2
    owners = [SimpleNamespace(block_table={"a": [2, 0]}) for _ in range(groups)]
    cache = SimpleNamespace(
        group_cache_managers=owners,
        block_size=SIZE,
        write_trash_index=BLOCKS * SIZE + 1,
        layer_index_to_group_indices={0: (0, 1), 1: (0, 0)},
        key_cache=[layers[0], layers[0] + 1000],
        value_cache=[layers[0] + 2000, layers[0] + 3000],
        num_blocks=100,
        free=100,
        use_prefix_sharing=True,
        shared=[],
    )
    cache.get_num_free_blocks = lambda: cache.free
    cache.mark_shareable_blocks_as_complete = lambda state, count: cache.shared.append(
        (state, count)
    )
    scheduler = SimpleNamespace(_allocate_blocks_if_needed=lambda state, tokens: tokens < 3)
    return cache, scheduler


def new_cache(rooms: list[bool]) -> tuple[Any, Any]:
    """A cache of transformers 5.23: `rooms` are its answers to whether there is room."""
    done: list[str] = []
    owner = SimpleNamespace(
        tokens_per_page=SIZE,
        write_trash_index=BLOCKS * SIZE,
        block_physical_stride=SIZE * 5,
        block_table={"a": [1]},
        get_cache_for_block_table=lambda index: (f"keys {index}", f"values {index}"),
    )
    cache = SimpleNamespace(
        layer_to_allocator={},
        cache_allocators={"full": owner},
        can_store_request_tokens=lambda state, tokens: rooms.pop(0),
        pool=SimpleNamespace(try_to_free_sectors=lambda: done.append("free")),
        evict_cached_blocks=lambda: done.append("evict"),
        use_prefix_sharing=True,
        mark_complete_blocks=lambda state, counts: done.append(f"{state} {counts}"),
        done=done,
    )
    return cache, SimpleNamespace(_try_to_meet_safety_margin=lambda: False)


def test_a_layers_tensor_is_seen_as_pages() -> None:
    cache, scheduler = old_cache()
    pages = Pages(cache, scheduler)
    assert (pages.size, pages.trash, pages.stride) == (SIZE, BLOCKS, 1)
    keys, values = pages.layer(0)
    assert keys.shape == values.shape == (BLOCKS, SIZE, HEADS, WIDTH)
    assert keys[0, 0, 0, 0] == 1000 and values[0, 0, 0, 0] == 3000, "the layer's own place"
    assert pages.layer(1)[0][1, 0, 0, 0] == SIZE * HEADS * WIDTH
    assert pages.blocks("a") == [2, 0]


def test_a_shared_tensor_is_asked_for_a_layers_pages() -> None:
    pages = Pages(*new_cache([]))
    assert (pages.size, pages.trash, pages.stride) == (SIZE, BLOCKS, 5)
    found: Any = pages.layer(1)
    assert found == ("keys 1", "values 1")
    assert pages.blocks("a") == [1]


def test_layers_that_attend_in_several_ways_are_refused() -> None:
    with pytest.raises(ValueError, match="attend in several ways"):
        Pages(*old_cache(groups=2))


def test_room_is_made_before_it_is_refused() -> None:
    for rooms, found, done in (
        ([True], True, []),
        ([False, True], True, ["free"]),
        ([False, False, True], True, ["free", "evict", "free"]),
        ([False, False, False], False, ["free", "evict", "free"]),
    ):
        cache, scheduler = new_cache(list(rooms))
        assert Pages(cache, scheduler).reserve("state") is found
        assert cache.done == done
    old = Pages(*old_cache())
    assert old.reserve("state", 2) is True
    assert old.reserve("state", 3) is False


def test_new_requests_begin_only_while_a_margin_is_free() -> None:
    cache, scheduler = old_cache()
    pages = Pages(cache, scheduler)
    for free, ample in ((100, True), (15, True), (14, False), (0, False)):
        cache.free = free
        assert pages.is_ample() is ample
    assert Pages(*new_cache([])).is_ample() is False


def test_a_full_block_is_marked_where_prefixes_are_shared() -> None:
    cache, scheduler = old_cache()
    Pages(cache, scheduler).complete("state")
    assert cache.shared == [("state", 1)]
    cache.use_prefix_sharing = False
    Pages(cache, scheduler).complete("state")
    assert len(cache.shared) == 1
    cache, scheduler = new_cache([])
    Pages(cache, scheduler).complete("state")
    assert cache.done == ["state {'full': 1}"]


# ---------------------------------------------------------------- attention over them


class Plain:
    """Pages in plain tensors."""

    size = SIZE

    def __init__(self) -> None:
        self.keys = torch.zeros(BLOCKS, SIZE, HEADS, WIDTH)
        self.values = torch.zeros(BLOCKS, SIZE, HEADS, WIDTH)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


def states(tokens: int, heads: int = HEADS) -> Tensor:
    return torch.randn(1, heads, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))


def test_a_chunk_attends_to_what_was_before_it() -> None:
    pages = Plain()
    query, key, value = states(6, 2 * HEADS), states(6), states(6) + 1
    whole = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), is_causal=True
    ).transpose(1, 2)
    places = torch.tensor([8, 9, 10, 11, 0, 1])  # page 2, then page 0
    found = []
    for begin, end in ((0, 4), (4, 6)):
        chunk = ChunkStep(pages, places[:end], end - begin)
        part = slice(begin, end)
        found.append(chunk.attend(0, query[:, :, part], key[:, :, part], value[:, :, part], None))
    assert torch.allclose(torch.cat(found, 1), whole, atol=1e-5)
    assert torch.equal(pages.keys[2, 0], key[0, :, 0]) and torch.equal(
        pages.values[0, 1], value[0, :, 5]
    )
    assert not pages.keys[1].any(), "no other page was written"


def test_a_step_writes_each_token_and_hands_the_pages_to_the_kernel() -> None:
    pages, asked = Plain(), []

    def kernel(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        asked.append((query.shape, keys is pages.keys, values is pages.values, rest[-1]))
        return query

    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    slots, lengths = torch.tensor([9, 4]), torch.tensor([2, 1], dtype=torch.int32)
    step: Any = DecodeStep(pages, kernel, table, slots, lengths)
    query, key, value = states(2), states(2) + 1, states(2) + 2
    out = step.attend(0, query, key, value, None)
    assert torch.equal(out[0], query[0].transpose(0, 1))
    assert torch.equal(pages.keys[2, 1], key[0, :, 0])
    assert torch.equal(pages.values[1, 0], value[0, :, 1])
    step.attend(0, query, key, value, 0.5)
    shape = torch.Size([2, HEADS, WIDTH])
    assert asked == [(shape, True, True, WIDTH**-0.5), (shape, True, True, 0.5)]


def test_a_cache_is_left_to_the_attention() -> None:
    holder = Holder()
    given: dict[str, Any] = {}
    key, value = states(1), states(2)
    assert holder.update(key, value, 0, given) == (key, value)
    assert given.pop("cache") is holder
    assert hand_over("other", key, value, 0, given) == (key, value)
    assert given == {"cache": "other"}
