"""PEFT's layers on a skeleton: what has to be put right that PEFT leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from servekit.engines.transformers.lora import boft, peft_model
from servekit.errors import RequestError
from tests.unit.engines.transformers.lora import making

ELSEWHERE = torch.device("meta")


@pytest.fixture
def model(tiny_model: Path) -> Any:
    boft.use_torch()
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = peft.BOFTConfig(boft_block_size=8, target_modules=making.QV, task_type=making.TASK)
    return peft.get_peft_model(base, config)


def test_constants_go_where_the_weights_are(model: Any) -> None:
    """BOFT makes its permutations on the CPU, and neither PEFT nor `.to` of the layer moves them
    where the base is on a GPU already: found on one.
    """
    names = {name for name, _ in model.named_buffers()}
    assert any(name.endswith("boft_P") for name in names)
    peft_model._bring_constants(model, ELSEWHERE)
    assert {str(buffer.device) for buffer in model.buffers()} == {"meta"}
    assert {name for name, _ in model.named_buffers()} == names


def test_weights_elsewhere_are_refused_by_name(model: Any) -> None:
    peft_model._bring_constants(model, ELSEWHERE)
    with pytest.raises(RequestError, match=r"is on cpu, not on meta"):
        peft_model._require_device(model, ELSEWHERE)
