"""The shape of a model's KV cache, from its configuration.

plain, grouped   2 × KV heads × head size, in each attention layer
MLA              in a latent cache KV rank + rotary part, once for keys and values; an engine
                 without such a cache stores the keys and values of each head
sliding window   such a layer stores a window of tokens, however long the text is
linear, Mamba    such a layer stores no tokens, and is left out
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servekit.model_metadata.gguf import MOST_LAYERS, Gguf

_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")
_FULL = ("full_attention", "attention", "hybrid")
#: What published configurations leave to the library, by the type of the text model.
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window_pattern": 6,
}
_UNSTATED: dict[str, dict[str, int]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "olmo3": {"sliding_window_pattern": 4},
    "llama4_text": {"sliding_window_pattern": 4},
}


@dataclass(frozen=True, slots=True)
class Attention:
    """The dimensions that determine the size of caches and activations. Numbers, not bytes."""

    per_token: int  # numbers that one full layer stores per token
    latent: int  # the same with a latent (MLA) cache; 0: no MLA model
    full_layers: int
    windowed_layers: int
    window: int  # tokens
    kv_heads: int
    hidden: int
    heads_width: int  # sum over all query heads
    vocabulary: int
    max_context: int  # 0: not stated

    def numbers(self, tokens: int, *, latent: bool = False) -> int:
        """Return the numbers stored for a text of `tokens` tokens, in all layers."""
        each = self.latent if latent and self.latent else self.per_token
        windowed = min(tokens, self.window) if self.window else tokens
        return each * (self.full_layers * tokens + self.windowed_layers * windowed)


def of_config(config: Mapping[str, Any]) -> Attention:
    """Read the shape from config.json. Raises ValueError if it is incomplete."""
    text = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(text, Mapping):
        raise ValueError("text_config is not a mapping")
    text = {**_UNSTATED.get(str(text.get("model_type") or config.get("model_type")), {}), **text}
    heads = _first_count(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    hidden = _first_count(text, "hidden_size", "n_embd", "n_embed", "d_model")
    layers = _first_count(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if not (heads and hidden and layers):
        raise ValueError("config.json does not state its layers, heads and size")
    if layers > MOST_LAYERS:
        raise ValueError(f"config.json states {layers} layers")
    head = _first_count(text, "head_dim") or hidden // heads
    kv_heads = _count_kv_heads(text) or heads
    rank, rotary = _first_count(text, "kv_lora_rank"), _first_count(text, "qk_rope_head_dim")
    keys, values = head, head
    if rank:
        keys = _first_count(text, "qk_nope_head_dim") + rotary
        values, kv_heads = _first_count(text, "v_head_dim") or keys, heads
    full, windowed, window = _count_layers(text, layers)
    return Attention(
        per_token=kv_heads * (keys + values),
        latent=rank + rotary if rank else 0,
        full_layers=full,
        windowed_layers=windowed,
        window=window,
        kv_heads=kv_heads,
        hidden=hidden,
        heads_width=heads * max(head, keys),
        vocabulary=_first_count(text, "vocab_size") or _first_count(config, "vocab_size"),
        max_context=_first_count(
            text,
            *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len"),
            "seq_length",
        ),
    )


def of_gguf(file: Gguf) -> Attention:
    """Read the shape from a GGUF file's metadata. Raises ValueError if it is incomplete."""

    def stated(key: str) -> int:
        value = file.of_architecture(key)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"its {key} is {value}")
        return int(value) if isinstance(value, int | float) else 0

    layers, hidden = stated("block_count"), stated("embedding_length")
    heads = stated("attention.head_count") or max(
        _list_numbers(file, "attention.head_count"), default=0
    )
    if not (layers and hidden and heads):
        raise ValueError("its metadata does not state its layers, heads and size")
    head = hidden // heads
    keys, values = stated("attention.key_length") or head, stated("attention.value_length") or head
    by_layer = (
        _list_numbers(file, "attention.head_count_kv")
        or [stated("attention.head_count_kv") or heads] * layers
    )
    interval = max(1, stated("full_attention_interval"))  # the layers between are recurrent
    attending = [count for count in by_layer[interval - 1 :: interval] if count]
    kv_heads = math.ceil(sum(attending) / max(1, len(attending)))
    return Attention(
        per_token=kv_heads * (keys + values),
        latent=0,
        # llama.cpp stores every layer's whole context unless configured to use the window.
        full_layers=len(attending),
        windowed_layers=0,
        window=0,
        kv_heads=kv_heads,
        hidden=hidden,
        heads_width=heads * keys,
        vocabulary=stated("vocab_size"),
        max_context=stated("context_length"),
    )


def _list_numbers(file: Gguf, key: str) -> list[int]:
    value = file.of_architecture(key)
    return [int(one) for one in value] if isinstance(value, list) else []


def _count_kv_heads(text: Mapping[str, Any]) -> int:
    """Return the number of KV heads; 0 if it is that of the other heads."""
    # Falcon's older and newer layers, and StarCoder's: all heads share one, or groups do
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        return 1
    return _first_count(text, "num_key_value_heads", "num_kv_heads", "multi_query_group_num")


def _count_layers(text: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Return the numbers of full and windowed layers, and the window."""
    window = _first_count(text, "sliding_window", "attention_chunk_size", "attention_window_size")
    kinds = _list_kinds(text, layers)
    if kinds is not None:
        # the last layers of Gemma 3n read the caches of earlier ones
        own = kinds[: layers - _first_count(text, "num_kv_shared_layers")]
        attending = [kind for kind in own if kind in _ATTENDING]
        full = sum(kind in _FULL for kind in attending)
        return (full, len(attending) - full, window) if window else (len(attending), 0, 0)
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # "LLLG": local layers, and a global one
        pattern = len(pattern)
    if window and isinstance(pattern, int) and pattern > 1:  # one full layer per pattern
        full = layers // pattern
        return full, layers - full, window
    if window and text.get("use_sliding_window", True):
        # Qwen's first layers have none
        full = min(layers, _first_count(text, "max_window_layers"))
        return full, layers - full, window
    return layers, 0, 0


def _list_kinds(text: Mapping[str, Any], layers: int) -> list[str] | None:
    """Return the kind of each layer, as `layer_types` has it; None if all are alike.

    Families of before that key name their full layers among recurrent ones in ways of their own.
    """
    for name in ("layer_types", "layers_block_type"):
        if (kinds := _list_of(text, name)) and len(kinds) >= layers:
            return [str(kind) for kind in kinds]
    period, offset = _first_count(text, "attn_layer_period"), text.get("attn_layer_offset", 0)
    interval, pattern = _first_count(text, "full_attention_interval"), text.get("block_types")
    linear, marks = text.get("linear_attn_config"), text.get("hybrid_override_pattern")
    every = range(layers)
    if period:  # Jamba
        full = {at for at in every if at % period == offset}
    elif interval:  # Qwen3-Next
        full = {at for at in every if (at + 1) % interval == 0}
    elif indices := _list_of(text, "attn_layer_indices") or _list_of(text, "full_attn_idxs"):
        full = {at for at in every if at in indices}  # Bamba, LFM2
    elif isinstance(marks, str) and marks:  # Nemotron-H
        full = {at for at, mark in enumerate(marks) if mark == "*"}
    elif flags := _list_of(text, "attn_type_list"):  # MiniMax
        full = {at for at, flag in enumerate(flags) if flag == 1}
    elif isinstance(linear, Mapping) and (numbers := _list_of(linear, "full_attn_layers")):
        full = {at for at in every if at + 1 in numbers}  # Kimi Linear
    elif isinstance(pattern, list) and pattern:  # RecurrentGemma, whose attention has a window
        named = (pattern * layers)[:layers]
        return ["sliding_attention" if kind == "attention" else "recurrent" for kind in named]
    else:
        return None
    return ["full_attention" if at in full else "recurrent" for at in every]


def _list_of(text: Mapping[str, Any], name: str) -> list[Any]:
    found = text.get(name)
    return found if isinstance(found, list) else []


def _first_count(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of these values that is a positive number; else 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
