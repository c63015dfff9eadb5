"""A skeleton shares the base's memory, and keeps to itself what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from servekit.engines.transformers.lora.module_clone import BaseChanged, ModuleClones, logits_of

IDS = list(range(3, 15))


@pytest.fixture
def model(tiny_model: Path) -> Any:
    made: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return made.eval()


def test_it_says_what_the_base_says_in_the_same_memory(model: Any) -> None:
    skeletons = ModuleClones(model, "sdpa")
    one = skeletons.new()
    assert torch.equal(logits_of(skeletons.base, IDS, 3), model(torch.tensor([IDS])).logits[0, -3:])
    pairs = list(zip(one.parameters(), model.parameters(), strict=True))
    assert all(a.data_ptr() == b.data_ptr() and a is not b for a, b in pairs)
    assert not skeletons.own_tensors(one)
    assert one.config is not model.config and not any(p.requires_grad for p in one.parameters())


def test_what_is_put_into_it_stays_there(model: Any) -> None:
    skeletons = ModuleClones(model, "sdpa")
    before, one = logits_of(skeletons.base, IDS, 3), skeletons.new()
    with skeletons.unchanged():
        layer: Any = one.get_submodule("model.layers.0.self_attn.q_proj")
        layer.weight.data = torch.zeros_like(layer.weight)
        one.set_submodule("model.layers.1.mlp.up_proj", nn.Linear(64, 128, bias=False))
        one.set_attn_implementation("eager")
    assert torch.equal(logits_of(skeletons.base, IDS, 3), before)
    assert model.config._attn_implementation == "sdpa"
    assert sorted(tensor.shape for tensor in skeletons.own_tensors(one)) == [(64, 64), (128, 64)]


def test_a_change_of_the_base_does_not_go_unseen(model: Any) -> None:
    skeletons = ModuleClones(model, None)
    one: Any = skeletons.new()
    with pytest.raises(BaseChanged), skeletons.unchanged():
        one.get_submodule("model.layers.0.self_attn.q_proj").weight.data[3, 5] += 1e-3
