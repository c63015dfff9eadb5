"""Tiny GGUF models that are no llama with a byte-level vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.unit.engines.origins import write_tiny_gguf

Tensors = dict[str, NDArray[np.float32]]

WIDTH, LAYERS, HEADS, FEED_FORWARD, POSITIONS = 32, 2, 2, 48, 64
#: As llama.cpp's converter has them: a piece that begins a word is marked, and no ##.
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁the", "▁sea", "▁is", "▁blue", "s", "▁deep"]
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


def write_tiny_bert(path: Path, pooling: int = 2, labels: tuple[str, ...] = ()) -> Tensors:
    """A BERT encoder; `pooling` is llama.cpp's number. Returns its tensors, by their GGUF names.

    With `labels` it has a head, as a classifier.
    """
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("bert")
    writer.add_token_list(WORDS)
    writer.add_token_types([_CONTROL, _UNKNOWN, *[_CONTROL] * 2, *[_NORMAL] * (len(WORDS) - 4)])
    writer.add_token_type_count(2)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    tensors = _bert_tensors()
    if labels:
        writer.add_array("bert.classifier.output_labels", labels)  # gguf 0.19 has a method
        tensors |= _head_tensors(len(labels))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _bert_tensors() -> Tensors:
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(WORDS), WIDTH),
        "token_types.weight": (2, WIDTH),
        "position_embd.weight": (POSITIONS, WIDTH),
        **_pair("token_embd_norm", WIDTH),
    }
    for block in (f"blk.{n}." for n in range(LAYERS)):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes |= _pair(block + name, WIDTH, WIDTH)
        shapes |= _pair(f"{block}attn_output_norm", WIDTH)
        shapes |= _pair(f"{block}ffn_up", FEED_FORWARD, WIDTH)
        shapes |= _pair(f"{block}ffn_down", WIDTH, FEED_FORWARD)
        shapes |= _pair(f"{block}layer_output_norm", WIDTH)
    made = {}
    for name, shape in shapes.items():
        values = (random.standard_normal(shape) * 0.3).astype(np.float32)
        made[name] = values + 1 if name.endswith("norm.weight") else values
    return made


def _head_tensors(labels: int) -> Tensors:
    random = np.random.default_rng(4)
    shapes = _pair("cls", WIDTH, WIDTH) | _pair("cls.output", labels, WIDTH)
    return {
        name: (random.standard_normal(shape) * 0.3).astype(np.float32)
        for name, shape in shapes.items()
    }


def _pair(name: str, size: int, *inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size, *inputs), f"{name}.bias": (size,)}


def bert_by_transformers(tensors: Tensors) -> Any:
    """The same model, by transformers."""
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=POSITIONS,
    )
    model: Any = BertModel(config, add_pooling_layer=False)
    names = {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    }
    state = {}
    for name, values in tensors.items():
        *block, part, kind = name.split(".")
        prefix = f"encoder.layer.{block[1]}." if block else ""
        state[f"{prefix}{names[part]}.{kind}"] = torch.from_numpy(values)
    model.load_state_dict(state)
    return model.eval()


def write_sentencepiece(path: Path, **fields: Any) -> Path:
    """The tiny llama, or what `fields` say, with a SentencePiece vocabulary: words with their
    space, letters, bytes.
    """
    words = ["▁", "▁the", "▁sea", "th", "se", "e", "a", "t", "h", "s", "▁t", "▁s", "▁th", "▁se"]
    special = ["<unk>", "<s>", "</s>"]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *data, *words]
    kinds = [_UNKNOWN, *[_CONTROL] * 2, *[_BYTE] * 256, *[_NORMAL] * len(words)]
    scores = [0.0] * 259 + [-1.0 - 0.1 * n for n in range(len(words))]
    return write_tiny_gguf(path, float32=True, sentencepiece=(tokens, scores, kinds), **fields)
