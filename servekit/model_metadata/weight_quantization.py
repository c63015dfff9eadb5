"""Quantisation of weights while the transformers engine loads them: methods, packages, sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

#: The package that each method needs.
PACKAGES = {"int8": "torchao", "fp8": "torchao", "int4": "bitsandbytes"}
#: vLLM's names where they differ from ours.
OF_VLLM = {"int4": "bitsandbytes"}
#: Weights of int4 that share a scale.
_BLOCK = 64
#: Weights that stay as they are, by parts of their names: the head, embeddings, and experts, which
#: the library fuses into one tensor that is no linear layer.
_KEPT = ("embed", "lm_head", "wte", "wpe", "norm", ".experts.", ".router.")


def explain_absence(method: str) -> str:
    """Return the sentence for a package that is not installed."""
    return (
        f"`quantization: {method}` needs {PACKAGES[method]}, which is not installed: pip install"
        " 'servekit[quantization]' adds it to this environment."
    )


def count_quantized_bytes(
    method: str, tensors: Mapping[str, Sequence[int]], float_bytes: float
) -> int:
    """Return the size of a model's weights, by name and shape, once they are quantised."""
    return int(
        sum(_tensor_bytes(method, name, shape, float_bytes) for name, shape in tensors.items())
    )


def _tensor_bytes(method: str, name: str, shape: Sequence[int], float_bytes: float) -> float:
    if len(shape) != 2 or not name.endswith(".weight") or any(part in name for part in _KEPT):
        return math.prod(shape) * float_bytes
    rows, columns = shape
    if method == "int4":  # with a scale in float32 for each block
        return rows * columns * (0.5 + 4 / _BLOCK)
    # with a scale for each row, and with int8 a zero point
    return rows * (columns + (5 if method == "int8" else 4))
