"""How far apart is too far."""

from __future__ import annotations

import math

import pytest
import torch

from servekit.engines.transformers.batching.self_check import relative_error
from servekit.engines.transformers.lora import verify


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_adapters_effect_is_never_within_it(device: str, dtype: torch.dtype) -> None:
    found = verify.tolerance_of(torch.device(device), dtype)
    assert 0 < found.noise <= found.logits < 0.5 and found.layers <= found.logits
    for effect in (0.2, 1.0, 3.0):
        assert found.allowed(effect) <= effect / 2
    assert found.allowed(0.0) == found.noise


def test_rounding_to_a_type_is_within_its_own() -> None:
    torch.manual_seed(0)
    exact = torch.randn(1000)
    for dtype in (torch.bfloat16, torch.float16):
        measured = relative_error(exact.to(dtype), exact)
        assert 0 < 4 * measured < verify.tolerance_of(torch.device("cpu"), dtype).layers


def test_what_is_no_number_is_no_agreement() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan, 1.0])
    assert math.isnan(relative_error(bad, good))
    assert relative_error(good, good) == 0.0
