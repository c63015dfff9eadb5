"""How much a model remembers of each token: its KV cache, from its configuration.

plain, grouped   2 × KV heads × head size, in each layer that attends
MLA              as its own cache has it: KV rank + rotary part, once for keys and values; an
                 engine without such a cache keeps what heads see: keys, and values
sliding window   such a layer remembers a window of tokens, however long the text is
linear, Mamba    a layer of that kind remembers no tokens, and is left out
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servekit.model_metadata.gguf import Gguf

_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True, slots=True)
class Attention:
    """What decides the size of caches and activations. Numbers, not bytes."""

    per_token: int  # numbers that one full layer keeps of a token
    latent: int  # the same where an engine keeps what MLA compresses; 0: it is no such model
    full_layers: int
    windowed_layers: int
    window: int  # tokens
    kv_heads: int
    hidden: int
    heads_width: int  # of all query heads together
    vocabulary: int
    max_context: int  # 0: it states none

    def numbers(self, tokens: int, *, latent: bool = False) -> int:
        """Numbers kept of one text of so many tokens, in all layers."""
        each = self.latent if latent and self.latent else self.per_token
        windowed = min(tokens, self.window) if self.window else tokens
        return each * (self.full_layers * tokens + self.windowed_layers * windowed)


def of_config(config: Mapping[str, Any]) -> Attention:
    """From config.json. Raises ValueError where it does not say enough."""
    text = config.get("text_config") or config.get("llm_config") or config
    if not isinstance(text, Mapping):
        raise ValueError("text_config is no mapping")
    heads = _count(text, "num_attention_heads", "n_head", "num_heads")
    hidden = _count(text, "hidden_size", "n_embd", "d_model")
    layers = _count(text, "num_hidden_layers", "n_layer", "num_layers")
    if not (heads and hidden and layers):
        raise ValueError("config.json does not tell its layers, heads and size")
    head = _count(text, "head_dim") or hidden // heads
    kv_heads = _count(text, "num_key_value_heads") or heads
    rank, rotary = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
    keys, values = head, head
    if rank:
        keys = _count(text, "qk_nope_head_dim") + rotary
        values, kv_heads = _count(text, "v_head_dim") or keys, heads
    full, windowed, window = _layers(text, layers)
    return Attention(
        per_token=kv_heads * (keys + values),
        latent=rank + rotary if rank else 0,
        full_layers=full,
        windowed_layers=windowed,
        window=window,
        kv_heads=kv_heads,
        hidden=hidden,
        heads_width=heads * max(head, keys),
        vocabulary=_count(text, "vocab_size") or _count(config, "vocab_size"),
        max_context=_count(text, "max_position_embeddings", "n_positions", "max_sequence_length"),
    )


def of_gguf(file: Gguf) -> Attention:
    """From a GGUF file's metadata, as `of_config`."""

    def stated(key: str) -> int:
        value = file.of_architecture(key)
        return int(value) if isinstance(value, int | float) else 0

    layers, hidden = stated("block_count"), stated("embedding_length")
    heads = stated("attention.head_count") or max(_each(file, "attention.head_count"), default=0)
    if not (layers and hidden and heads):
        raise ValueError("its metadata does not tell its layers, heads and size")
    head = hidden // heads
    keys, values = stated("attention.key_length") or head, stated("attention.value_length") or head
    by_layer = (
        _each(file, "attention.head_count_kv")
        or [stated("attention.head_count_kv") or heads] * layers
    )
    attending = [count for count in by_layer if count]
    kv_heads = math.ceil(sum(attending) / max(1, len(attending)))
    return Attention(
        per_token=kv_heads * (keys + values),
        latent=0,
        # llama.cpp keeps every layer's whole context unless it is told to make use of the window.
        full_layers=len(attending),
        windowed_layers=0,
        window=0,
        kv_heads=kv_heads,
        hidden=hidden,
        heads_width=heads * keys,
        vocabulary=stated("vocab_size"),
        max_context=stated("context_length"),
    )


def _each(file: Gguf, key: str) -> list[int]:
    value = file.of_architecture(key)
    return [int(one) for one in value] if isinstance(value, list) else []


def _layers(text: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Layers that attend to all tokens, those that attend to a window, and that window."""
    window = _count(text, "sliding_window", "attention_chunk_size")
    kinds = text.get("layer_types")
    if isinstance(kinds, Sequence) and not isinstance(kinds, str) and kinds:
        attending = [kind for kind in kinds if kind in _ATTENDING]
        full = sum(kind in ("full_attention", "attention") for kind in attending)
        return (full, len(attending) - full, window) if window else (len(attending), 0, 0)
    pattern = _count(text, "sliding_window_pattern")
    if window and pattern > 1:  # one full layer in so many
        full = layers // pattern
        return full, layers - full, window
    if window and text.get("use_sliding_window", True):
        return 0, layers, window
    return layers, 0, 0


def _count(config: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a number; else 0."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
