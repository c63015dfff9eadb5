"""Adapters made on the spot, and what PEFT itself says with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from servekit.engines.transformers.lora import boft
from servekit.protocol.adapters import AdapterSpec

TASK = "CAUSAL_LM"
QV = ["q_proj", "v_proj"]
#: Tokens that are compared, of each answer.
COUNT = 16
#: By how the engine runs an adapter, those of `configs`.
MODES = {
    **dict.fromkeys(("lora", "rslora", "patterns", "prompt", "encoder"), "mixed"),
    **dict.fromkeys(("saved", "embeds", "head", "ia3", "vera"), "grouped"),
    **dict.fromkeys(("dora", "loha", "lokr", "oft", "boft", "butterfly"), "merged"),
}
#: One of each mode, and one without weights of its own in the layers.
FEW = ("lora", "prompt", "ia3", "boft")


def configs() -> dict[str, Any]:
    """One configuration of each kind, by a name for it; weights are random, not PEFT's zeros."""
    lora: dict[str, Any] = {"init_lora_weights": False, "task_type": TASK}
    plain: dict[str, Any] = {"init_weights": False, "task_type": TASK}
    return {
        "lora": peft.LoraConfig(r=4, target_modules=QV, **lora),
        "rslora": peft.LoraConfig(
            r=8, lora_alpha=16, use_rslora=True, target_modules="all-linear", **lora
        ),
        "patterns": peft.LoraConfig(
            r=2,
            target_modules=["down_proj", "q_proj"],
            rank_pattern={"q_proj": 6},
            alpha_pattern={"q_proj": 3},
            **lora,
        ),
        "saved": peft.LoraConfig(r=4, target_modules=QV, modules_to_save=["lm_head"], **lora),
        "embeds": peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], **lora),
        "head": peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"], **lora),
        "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=QV, **lora),
        "ia3": peft.IA3Config(
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            init_ia3_weights=False,
            task_type=TASK,
        ),
        "loha": peft.LoHaConfig(r=4, target_modules=QV, **plain),
        "lokr": peft.LoKrConfig(r=4, target_modules=QV, **plain),
        "oft": peft.OFTConfig(r=0, oft_block_size=8, target_modules=QV, **plain),
        "boft": peft.BOFTConfig(boft_block_size=8, target_modules=QV, **plain),
        "butterfly": peft.BOFTConfig(
            boft_block_size=8, boft_n_butterfly_factor=2, target_modules=QV, **plain
        ),
        "vera": peft.VeraConfig(r=4, target_modules=["q_proj"], **plain),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=5, task_type=TASK),
        "encoder": peft.PromptEncoderConfig(
            num_virtual_tokens=40, encoder_hidden_size=16, task_type=TASK
        ),
    }


def write(model_folder: Path, folder: Path, config: Any, seed: int = 0, noise: float = 0.0) -> Path:
    """Save an adapter for the model, with weights as PEFT makes them, and `noise` added."""
    boft.use_torch()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    made: Any = peft.get_peft_model(model, config)
    for parameter in made.parameters():
        if noise and parameter.requires_grad:
            parameter.data += noise * torch.randn_like(parameter)
    made.save_pretrained(str(folder))
    return folder


def spec(folder: Path, name: str = "") -> AdapterSpec:
    return AdapterSpec(name or folder.name, str(folder))


def reference(
    model_folder: Path, folder: Path, prompts: list[str], count: int = COUNT
) -> list[list[int]]:
    """What plain PEFT's `generate` says, greedily, each prompt alone."""
    boft.use_torch()
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    adapted: Any = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        # without a cache: peft 0.21 forgets virtual tokens in that of transformers 5.24
        whole = adapted.generate(
            **ids,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=False,
        )
        answers.append(whole[0, ids["input_ids"].shape[1] :].tolist())
    return answers
