"""Quantisation of weights while the transformers engine loads them: methods, packages, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The package that each method needs.
PACKAGES = {"int8": "torchao", "fp8": "torchao", "int4": "bitsandbytes"}
#: Bytes of a quantised weight; of int4 with the scale of each 64 weights, in float32.
_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 64}


def explain_absence(method: str) -> str:
    """Return the sentence for a package that is not installed."""
    return (
        f"`quantization: {method}` needs {PACKAGES[method]}, which is not installed: pip install"
        " 'servekit[quantization]' adds it to this environment."
    )


def size_bytes(method: str, elements: int, config: Mapping[str, Any], float_bytes: float) -> int:
    """Return the size of a model's quantised weights.

    `elements` are all numbers of the model, `config` is its config.json. Embeddings and the head
    stay in floats.
    """
    text = config.get("text_config") or config
    rows, width = text.get("vocab_size"), text.get("hidden_size")
    table = rows * width if isinstance(rows, int) and isinstance(width, int) else 0
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))
    kept = min(table if tied else 2 * table, elements)
    return int(kept * float_bytes + (elements - kept) * _BYTES[method])
