"""The arguments of a forward pass come out as they went in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from servekit.engines.transformers.batching.paged_attention import Layout
from servekit.engines.transformers.tensor_parallel import messages, tensor_transfer

CPU = torch.device("cpu")


def sent(arguments: dict[str, Any], past: Any = None, pages: Any = None) -> Any:
    """Over a message and one tensor, as between two ranks."""
    packed, tensors = tensor_transfer.pack_arguments([], arguments)
    whole = tensor_transfer.join_tensors(tensors, CPU)
    assert len(whole) == tensor_transfer.count_buffer_bytes(tensors)
    run = messages.Run("model", "sdpa", packed, tensor_transfer.tensor_forms(tensors), len(whole))
    over = messages._order.decode(messages._encode(run))
    args, kwargs = tensor_transfer.unpack_value(
        over.arguments, tensor_transfer.split_tensors(whole, over.tensors), past, pages
    )
    assert args == []
    return kwargs


def test_tensors_of_any_dtype_and_shape() -> None:
    arguments: dict[str, Any] = {
        "input_ids": torch.arange(7, dtype=torch.int32)[None],
        "mask": {"full_attention": torch.rand(1, 1, 3, 5) > 0.5},
        "indices": [torch.arange(3), torch.empty(0, dtype=torch.int64)],
        "embeds": torch.randn(2, 3, dtype=torch.bfloat16),
        "scalar": torch.tensor(4.5),
        "strided": torch.arange(12).view(3, 4).T,
    }
    found = sent(arguments)
    assert torch.equal(found["mask"]["full_attention"], arguments["mask"]["full_attention"])
    for one, other in zip(found["indices"], arguments["indices"], strict=True):
        assert torch.equal(one, other)
    for name in ("input_ids", "embeds", "scalar", "strided"):
        assert torch.equal(found[name], arguments[name])
        assert found[name].dtype == arguments[name].dtype


def test_plain_values_stay_as_they_are() -> None:
    plain = {"use_cache": False, "max_length_q": 5, "scale": 0.5, "name": "a", "none": None}
    assert sent(plain) == plain


def test_caches_are_each_ranks_own() -> None:
    pages = SimpleNamespace(layout=None, device=CPU)
    theirs = SimpleNamespace(layout=Layout.build([3, 0], [1, 4], CPU))
    past, full = DynamicCache(), DynamicCache()
    full.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    found = sent({"cache": theirs, "past_key_values": full}, past, pages)
    assert found["cache"] is pages
    assert found["past_key_values"] is past
    assert sent({"past_key_values": DynamicCache()}, past)["past_key_values"] is None
    assert pages.layout is not None
    assert (pages.layout.pasts, pages.layout.queries) == ([3, 0], [1, 4])


def test_what_no_other_rank_could_have_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a object"):
        tensor_transfer.pack_arguments([], {"what": object()})
