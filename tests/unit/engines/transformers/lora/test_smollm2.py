"""A real language model: LoRA three times, DoRA, IA3 and BOFT, against PEFT's own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest

from tests.unit.engines.harness import Harness, make_spec, reference
from tests.unit.engines.transformers.lora import making

pytestmark = [pytest.mark.lane("adapters"), pytest.mark.model]

PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, " * 12]
COUNT = 10


def configs() -> dict[str, Any]:
    """Weights as PEFT draws them, which is far from nothing, and from sense."""
    lora: dict[str, Any] = {"init_lora_weights": "gaussian", "task_type": making.TASK}
    return {
        "lora1": peft.LoraConfig(r=8, target_modules=making.QV, **lora),
        "lora2": peft.LoraConfig(r=16, target_modules="all-linear", use_rslora=True, **lora),
        "lora3": peft.LoraConfig(r=4, lora_alpha=16, target_modules=["down_proj"], **lora),
        "dora": peft.LoraConfig(r=8, use_dora=True, target_modules=making.QV, **lora),
        "ia3": peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            task_type=making.TASK,
        ),
        "boft": peft.BOFTConfig(boft_block_size=8, target_modules=making.QV, task_type=making.TASK),
    }


def test_beside_each_other_and_the_base_all_say_what_peft_says(
    smollm2: Path, tmp_path: Path
) -> None:
    folders = {
        name: making.write(smollm2, tmp_path / name, config, seed, noise=0.02)
        for seed, (name, config) in enumerate(configs().items())
    }
    expected = {name: making.reference(smollm2, f, PROMPTS, COUNT) for name, f in folders.items()}
    expected[""] = reference(smollm2, PROMPTS, COUNT)
    one = Harness(make_spec(smollm2, adapters=tuple(map(making.spec, folders.values()))))
    try:
        assert not one.info.refused_adapters
        modes = {info.name: info.mode for info in one.info.adapters}
        assert modes == dict.fromkeys(("lora1", "lora2", "lora3"), "mixed") | {
            "dora": "merged",
            "ia3": "grouped",
            "boft": "merged",
        }
        jobs = [
            (name, turn, one.submit(prompt, adapter=name, max_tokens=COUNT, ignore_eos=True))
            for turn, prompt in enumerate(PROMPTS)
            for name in expected
        ]
        wrong = [(n, turn) for n, turn, job in jobs if one.tokens(job) != expected[n][turn]]
        assert not wrong
        for name in folders:
            one.engine.unload_adapter(name)
        after = [one.generate(prompt, max_tokens=COUNT, ignore_eos=True) for prompt in PROMPTS]
        assert after == expected[""]
    finally:
        one.close()
