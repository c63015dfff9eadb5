"""KV caches by configuration. The figures are those of the models' own papers and cards."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.model_metadata.gguf import Gguf
from servekit.model_metadata.kv_cache_shape import of_config, of_gguf

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
        # BLOOM's and MPT's
        ({"n_embed": 1024, "n_layer": 24, "num_attention_heads": 16}, 1, False, 2 * 1024 * 24),
        ({"d_model": 4096, "n_heads": 32, "n_layers": 32}, 1, False, 2 * 4096 * 32),
    ],
)
def test_what_is_kept_of_a_text(
    config: dict[str, Any], tokens: int, latent: bool, numbers: int
) -> None:
    assert of_config(config).numbers(tokens, latent=latent) == numbers


def layers(count: int, **more: Any) -> dict[str, Any]:
    """A model of `count` layers that store 64 numbers of a token, with its family's own keys."""
    size = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {**size, "num_hidden_layers": count, **more}


@pytest.mark.parametrize(
    ("config", "full", "windowed"),
    [
        # as published: the library knows the rest
        (layers(42, model_type="gemma2", sliding_window=4096), 21, 21),
        (layers(62, model_type="gemma3_text", sliding_window=1024), 10, 52),
        ({"model_type": "gemma3", "text_config": layers(34, sliding_window=1024)}, 5, 29),
        (layers(32, model_type="olmo3", sliding_window=4096), 8, 24),
        (layers(48, model_type="llama4_text", attention_chunk_size=8192), 12, 36),
        (layers(64, sliding_window=4096, sliding_window_pattern="LLLG"), 16, 48),
        (layers(28, sliding_window=4096, max_window_layers=21), 21, 7),
        (layers(28, sliding_window=4096, max_window_layers=28, use_sliding_window=False), 28, 0),
        # recurrent layers among those that attend, as each family names them
        (layers(32, attn_layer_period=8, attn_layer_offset=4), 4, 0),
        (layers(32, attn_layer_indices=[9, 18, 27]), 3, 0),
        (layers(16, full_attn_idxs=[2, 5, 8, 10, 12, 14]), 6, 0),
        (layers(48, full_attention_interval=4), 12, 0),
        (layers(12, hybrid_override_pattern="M-M*-M-M*-M-"), 2, 0),
        (layers(8, attn_type_list=[0, 0, 0, 1, 0, 0, 0, 1]), 2, 0),
        (layers(27, linear_attn_config={"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}), 7, 0),
        (layers(6, layers_block_type=["mamba", "hybrid"] * 3), 3, 0),
        (
            layers(
                *(26,),
                block_types=["recurrent", "recurrent", "attention"],
                attention_window_size=2048,
            ),
            *(0, 8),
        ),
        # layers that read the caches of others
        (
            layers(
                *(30,),
                layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 6,
                num_kv_shared_layers=10,
                sliding_window=512,
            ),
            *(4, 16),
        ),
    ],
)
def test_which_layers_keep_the_whole_text(config: dict[str, Any], full: int, windowed: int) -> None:
    found = of_config(config)
    assert (found.full_layers, found.windowed_layers) == (full, windowed)


@pytest.mark.parametrize(
    ("keys", "kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": False}, 4),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
    ],
)
def test_heads_that_share_keys_and_values(keys: dict[str, Any], kv_heads: int) -> None:
    found = of_config(layers(2, num_key_value_heads=None, **keys))
    assert (found.kv_heads, found.per_token) == (kv_heads, kv_heads * 2 * 16)


def test_gemma_3_of_which_the_file_says_little() -> None:
    """Its smallest one that sees: heads and their size are the library's."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    found = of_config({"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}})
    assert (found.per_token, found.kv_heads) == (2 * 4 * 256, 4)


def test_a_gguf_file_with_recurrent_layers() -> None:
    metadata = {
        "general.architecture": "qwen3next",
        "qwen3next.block_count": 48,
        "qwen3next.embedding_length": 2048,
        "qwen3next.attention.head_count": 16,
        "qwen3next.attention.head_count_kv": 2,
        "qwen3next.attention.key_length": 256,
        "qwen3next.attention.value_length": 256,
    }
    assert of_gguf(Gguf(metadata, 0, 0)).numbers(1) == 48 * 2 * 512
    metadata["qwen3next.full_attention_interval"] = 4
    assert of_gguf(Gguf(metadata, 0, 0)).numbers(1) == 12 * 2 * 512


def test_layers_that_nothing_has_are_not_listed() -> None:
    with pytest.raises(ValueError, match=f"config.json states {2**40} layers"):
        of_config(layers(2**40, attn_layer_period=8))


@pytest.mark.parametrize("config", [{}, {"hidden_size": "x"}, {"text_config": 5}, {"n_head": True}])
def test_what_does_not_say_enough(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        of_config(config)
