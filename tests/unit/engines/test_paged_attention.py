"""Attention request by request: the same text as any other, whatever shares the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from servekit.engines import paged_attention, probe
from servekit.engines.continuous import ContinuousRunner
from servekit.engines.paged_attention import Layout
from servekit.engines.static import StaticRunner
from servekit.errors import LoadError
from tests.unit.engines.harness import Harness, reference

Make = Callable[..., Harness]
CPU = torch.device("cpu")


def test_fresh_prompts_read_no_cache() -> None:
    layout = Layout.of([0, 0], [3, 1], CPU)
    assert layout.gather is None
    assert not layout.groups
    spans = [(c.span.query, c.span.queries, c.span.key, c.span.keys) for c in layout.chunks]
    assert spans == [(0, 3, 0, 3), (3, 1, 3, 1)]
    assert all(chunk.mask is None for chunk in layout.chunks)


def test_decoding_requests_of_like_length_share_a_group() -> None:
    layout = Layout.of([10, 400, 90, 420], [1, 1, 1, 1], CPU)
    assert [group.rows.tolist() for group in layout.groups] == [[0, 2], [1, 3]]
    assert [group.length for group in layout.groups] == [96, 448]
    masks = [group.mask for group in layout.groups if group.mask is not None]
    assert [mask.sum((1, 2, 3)).tolist() for mask in masks] == [[11, 91], [401, 421]]


def test_a_request_alone_has_all_its_keys_and_nothing_masked() -> None:
    layout = Layout.of([500, 6], [1, 1], CPU)  # not of like length
    long, short = layout.groups
    assert (long.rows.tolist(), long.length, long.mask) == ([0], 501, None)
    assert (short.rows.tolist(), short.length, short.mask) == ([1], 7, None)
    assert long.bias(torch.zeros(1)) is None
    assert layout.gather is not None
    assert layout.gather.tolist() == list(range(508))


def test_a_mask_is_made_into_what_is_added_once_for_all_layers() -> None:
    (group,) = Layout.of([1, 2], [1, 1], CPU).groups
    bias = group.bias(torch.zeros(1, dtype=torch.bfloat16))
    assert bias is not None and group.mask is not None
    assert bias.dtype == torch.bfloat16
    assert torch.equal(bias == 0, group.mask)
    assert torch.equal(bias == float("-inf"), ~group.mask)
    assert group.bias(torch.zeros(1, dtype=torch.bfloat16)) is bias


def test_padding_reads_the_requests_own_keys() -> None:
    layout = Layout.of([2, 5], [1, 1], CPU)
    (group,) = layout.groups
    assert layout.gather is not None
    first, second = layout.gather.view(2, group.length).tolist()
    assert first[:4] == [0, 1, 2, 2]
    assert second[:7] == [3, 4, 5, 6, 7, 8, 8]
    assert set(first) == {0, 1, 2}
    assert set(second) == set(range(3, 9))


def test_a_chunk_sees_its_past_and_no_future() -> None:
    layout = Layout.of([2, 4], [3, 1], CPU)
    (chunk,) = layout.chunks
    assert chunk.mask is not None
    assert chunk.mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert layout.gather is not None
    keys = layout.gather[chunk.span.key : chunk.span.key + chunk.span.keys]
    assert keys.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_lengths_chunks_and_decodes_mix_in_one_batch(
    harness: Make, tiny_model: Path, attention: str | None
) -> None:
    one = harness(options={"max_batch_tokens": 48, "attention": attention})
    lengths = [1, 2, 7, 31, 130, 90, 3, 260, 1, 40]
    prompts = ["a" * length for length in lengths]
    expected = reference(tiny_model, prompts, 30)
    jobs = [one.submit(prompt, max_tokens=30, ignore_eos=True) for prompt in prompts]
    assert [one.tokens(job) for job in jobs] == expected


def test_it_is_used_where_it_suits(harness: Make) -> None:
    assert paged_attention.NAME in harness().info.detail
    assert "sdpa" in harness(options={"attention": "sdpa"}).info.detail


# ---------------------------------------------------------------- the probe at load time


def test_an_attention_that_is_wrong_is_found_out_and_not_used(
    harness: Make, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def neighbours(layout: Layout, packed: Any) -> Any:
        return packed if layout.gather is None else packed[layout.gather].flip(0)

    monkeypatch.setattr(Layout, "read_index", neighbours)
    one = harness()
    assert isinstance(one.engine._runner, ContinuousRunner)
    assert paged_attention.NAME not in one.info.detail
    expected = reference(tiny_model, ["The quick"], 12)
    assert [one.generate("The quick", max_tokens=12, ignore_eos=True)] == expected


def test_a_model_that_fails_the_probe_runs_one_request_at_a_time(
    harness: Make, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_TOLERANCE", {torch.float32: -1.0})
    one = harness()
    assert isinstance(one.engine._runner, StaticRunner)
    expected = reference(tiny_model, ["The quick"], 12)
    assert [one.generate("The quick", max_tokens=12, ignore_eos=True)] == expected
    with pytest.raises(LoadError, match="its logits are off"):
        harness(options={"batching": "continuous"})
