"""KV caches by configuration. The figures are those of the models' own papers and cards."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.model_metadata.kv_cache_shape import of_config

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    **LLAMA_8B,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "tokens", "latent", "numbers"),
    [
        (LLAMA_8B, 1, False, 2 * 8 * 128 * 32),  # 128 KiB in 16 bits
        (LLAMA_8B, 1000, False, 2 * 8 * 128 * 32 * 1000),
        ({**LLAMA_8B, "head_dim": 256}, 1, False, 2 * 8 * 256 * 32),
        ({**LLAMA_8B, "num_key_value_heads": None}, 1, False, 2 * 32 * 128 * 32),
        ({"text_config": LLAMA_8B, "hidden_size": 1}, 1, False, 2 * 8 * 128 * 32),
        # MLA: the compressed cache, and what an engine without one keeps
        (DEEPSEEK_V3, 1, True, 576 * 61),
        (DEEPSEEK_V3, 1, False, 128 * (192 + 128) * 61),
        # windows
        ({**LLAMA_8B, "sliding_window": 4096}, 8192, False, 2048 * 32 * 4096),
        ({**LLAMA_8B, "sliding_window": 4096}, 1024, False, 2048 * 32 * 1024),
        (
            {**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False},
            *(8192, False, 2048 * 32 * 8192),
        ),
        (
            {
                **LLAMA_8B,
                "sliding_window": 1024,
                "layer_types": ["sliding_attention"] * 24 + ["full_attention"] * 8,
            },
            *(8192, False, 2048 * (8 * 8192 + 24 * 1024)),
        ),
        (
            {**LLAMA_8B, "sliding_window": 1024, "sliding_window_pattern": 4},
            *(8192, False, 2048 * (8 * 8192 + 24 * 1024)),
        ),
        (
            {**LLAMA_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8},
            *(1, False, 2048 * 8),
        ),
        # GPT-2's names
        ({"n_embd": 768, "n_head": 12, "n_layer": 12}, 1, False, 2 * 768 * 12),
    ],
)
def test_what_is_kept_of_a_text(
    config: dict[str, Any], tokens: int, latent: bool, numbers: int
) -> None:
    assert of_config(config).numbers(tokens, latent=latent) == numbers


@pytest.mark.parametrize("config", [{}, {"hidden_size": "x"}, {"text_config": 5}, {"n_head": True}])
def test_what_does_not_say_enough(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        of_config(config)
