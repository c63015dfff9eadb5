"""A small model with eyes: LLaVA's architecture with random weights, and SmolLM2's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

LIBRARY: Any = transformers  # whose types leave these models out
PIXELS, PATCH = 56, 14
TOKENS_PER_IMAGE = (PIXELS // PATCH) ** 2
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_seeing_model(folder: Path, tokenizer_from: Path) -> Path:
    """Write the model; its answers depend on the image, as its weights are large."""
    tokenizer = LIBRARY.AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = LIBRARY.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=PIXELS,
        patch_size=PATCH,
    )
    text = LIBRARY.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LIBRARY.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=TOKENS_PER_IMAGE,
    )
    torch.manual_seed(1)
    model = LIBRARY.LlavaForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                weights.mul_(6.0 if "language" in name else 12.0)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"  # with the names of published models, which vLLM knows
    tower = "vision_tower."
    named = {
        name.replace(tower, f"{tower}vision_model."): weights
        for name, weights in load_file(file).items()
    }
    save_file(named, file, metadata={"format": "pt"})
    images = LIBRARY.CLIPImageProcessorPil(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
    )
    LIBRARY.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    return folder
