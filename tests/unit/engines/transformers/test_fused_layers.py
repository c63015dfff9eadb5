"""Fused operations of layers: used only where they agree with the model's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from servekit.engines.transformers import fused_layers
from tests.unit.engines.transformers.interpreting import interpret


def llama_norm(dtype: torch.dtype = torch.bfloat16) -> Any:
    norm = LlamaRMSNorm(24).to(dtype)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_norm_says_what_the_model_s_own_says(dtype: torch.dtype) -> None:
    norm = llama_norm(dtype)
    states = torch.randn(1, 5, 24).to(dtype) * 7
    expected = norm(states)
    norm.__class__ = fused_layers.fused_norm(type(norm))
    torch.testing.assert_close(norm(states), expected, rtol=2e-2, atol=2e-2)
    assert isinstance(norm, LlamaRMSNorm)


def test_copies_of_a_fused_norm_use_their_own_weight() -> None:
    norm = llama_norm()
    norm.__class__ = fused_layers.fused_norm(type(norm))
    other = copy.deepcopy(norm)
    nn.init.zeros_(other.weight)
    states = torch.ones(1, 1, 24, dtype=torch.bfloat16)
    assert not other(states).any()
    assert norm(states).any()


class Shifted(LlamaRMSNorm):
    """As Gemma's: the weight is an offset from one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        states: Tensor = super().forward(hidden_states)
        return states * (1 + self.weight) / self.weight


Shifted.__name__ = "ShiftedRMSNorm"


@torch.no_grad()
def test_a_norm_of_another_formula_is_found_out() -> None:
    norm = Shifted(24).to(torch.bfloat16)
    nn.init.normal_(norm.weight)
    assert not fused_layers._works(fused_layers._check_norm, norm)
    assert fused_layers._works(fused_layers._check_norm, llama_norm())


def test_norms_are_found_by_their_name_and_weight() -> None:
    assert fused_layers._is_norm(llama_norm())
    assert not fused_layers._is_norm(llama_norm(torch.float32))
    assert not fused_layers._is_norm(GemmaRMSNorm(8).to(torch.bfloat16))  # has another eps
    assert not fused_layers._is_norm(nn.LayerNorm(8).to(torch.bfloat16))


def test_a_model_on_the_cpu_is_left_alone(tiny_model: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    before = [type(one) for one in model.modules()]
    fused_layers.fuse_layers(model)
    assert [type(one) for one in model.modules()] == before


INTERPRETED = """
import torch
from servekit.engines.transformers.decode import rotary_triton
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
for q_heads, k_heads, tokens, width in ((4, 2, 3, 16), (3, 3, 1, 24), (1, 1, 5, 80)):
    draw = lambda heads: torch.randn(1, tokens, heads, width).transpose(1, 2)
    q, k, (cos, sin) = draw(q_heads), draw(k_heads), torch.randn(2, 1, tokens, width)
    pairs = zip(rotary_triton.rotate(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin))
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
"""


@pytest.mark.lane("packages")
@pytest.mark.timeout(900)
def test_our_kernel_interpreted_rotates_as_the_library_does(tmp_path: Path) -> None:
    """Its arithmetic, without a GPU."""
    interpret(INTERPRETED, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_a_model_on_a_gpu_computes_the_same_logits_in_fewer_kernels(tiny_model: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    model = model.to("cuda")
    ids = torch.arange(8, 40, device="cuda").unsqueeze(0)
    with torch.no_grad():
        expected = model(ids).logits
        fused_layers.fuse_layers(model)
        found = model(ids).logits
    assert any(type(one) is fused_layers.fused_norm(LlamaRMSNorm) for one in model.modules())
    assert float((found - expected).norm() / expected.norm()) < 0.1
