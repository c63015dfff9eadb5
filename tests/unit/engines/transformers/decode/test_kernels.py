"""Attention over pages: what the reference says, and that a kernel is believed only on proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from servekit.engines.transformers.decode import kernels
from servekit.engines.transformers.decode.kernels import Kernel, Shape
from tests.unit.engines.transformers.interpreting import interpret

CPU = torch.device("cpu")
SHAPE = Shape(6, 2, 16, 8, torch.float32, CPU)


def by_hand(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One request and one head at a time."""
    size, share = keys.shape[1], query.shape[1] // keys.shape[2]
    out = torch.empty_like(query)
    for request, length in enumerate(lengths.tolist()):
        places = [(int(table[request, at // size]), at % size) for at in range(length)]
        for head in range(query.shape[1]):
            own = torch.stack([keys[page, at, head // share] for page, at in places])
            said = torch.stack([values[page, at, head // share] for page, at in places])
            weights = (own @ query[request, head] * query.shape[-1] ** -0.5).softmax(0)
            out[request, head] = weights @ said
    return out


def test_the_reference_is_attention() -> None:
    case = kernels.make_example(SHAPE, [1, 8, 9, 30])
    found = kernels.reference_attention(*case)
    torch.testing.assert_close(found, by_hand(*case[:5]), rtol=1e-5, atol=1e-5)


def _off_by_one(*case: Any) -> Tensor:
    query, keys, values, table, lengths, scale = case
    shorter = (lengths - 1).clamp(min=1)
    return kernels.reference_attention(query, keys, values, table, shorter, scale)


def _one_page_only(*case: Any) -> Tensor:
    query, keys, values, table, lengths, scale = case
    return kernels.reference_attention(
        query, keys, values, table[:, :1].expand_as(table), lengths, scale
    )


@pytest.mark.parametrize("wrong", [_off_by_one, _one_page_only])
def test_a_wrong_kernel_is_found_out(wrong: Any) -> None:
    kernels.check_kernel(Kernel("right", kernels.reference_attention), SHAPE)
    with pytest.raises(ValueError, match="off by"):
        kernels.check_kernel(Kernel("wrong", wrong), SHAPE)


def test_what_is_not_installed_is_told() -> None:
    with pytest.raises(LookupError, match=r"triton: .*GPU"):
        kernels.choose_kernel("triton", SHAPE)
    with pytest.raises(
        LookupError, match=r"flash3: .*flash3|flash_attn_interface is not installed"
    ):
        kernels.choose_kernel("flash3", SHAPE)
    with pytest.raises(LookupError, match=r"block_size: 256|has no paged attention"):
        kernels.choose_kernel("torch", SHAPE)
    assert kernels.choose_kernel("reference", SHAPE).name == "reference"
    with pytest.raises(LookupError, match=r"(?s)triton.*torch"):
        kernels.choose_kernel("auto", SHAPE)


INTERPRETED = """
import torch
from servekit.engines.transformers.decode import kernels, paged_triton
for heads, kv_heads, width, size, dtype in (
    (4, 2, 16, 32, torch.float32), (7, 1, 24, 8, torch.float32), (4, 4, 16, 16, torch.float16),
):
    shape = kernels.Shape(heads, kv_heads, width, size, dtype, torch.device("cpu"))
    for lengths in ([1, 7, size, size + 1, 300], [5]):
        case = kernels.make_example(shape, lengths)
        found = paged_triton.compute_paged_attention(*case).float()
        expected = kernels.reference_attention(*case).float()
        assert float((found - expected).norm() / expected.norm()) < 1e-3, (shape, lengths)
    assert paged_triton.splits_of(1, 2, 10_000) == 32
    assert paged_triton.splits_of(256, 8, 10_000) == 4
    assert paged_triton.splits_of(256, 8, 100) == 1
"""


@pytest.mark.lane("packages")
@pytest.mark.timeout(900)
def test_our_kernel_interpreted_says_what_the_reference_says(tmp_path: Path) -> None:
    """Its arithmetic, without a GPU."""
    interpret(INTERPRETED, tmp_path)
