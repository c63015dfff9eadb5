"""Quantisation of the weights while a model is loaded, by torchao or bitsandbytes.

    int8    torchao: weights in 8 bits with a scale for each row, products in the model's type
    fp8     torchao: weights and their inputs in 8 bits, products by the GPU's FP8 units
    int4    bitsandbytes: weights in 4 bits (NF4), unpacked for each product

Linear layers of the transformer are quantised; embeddings, the head and norms stay as they are.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers

from servekit.errors import LoadError
from servekit.model_metadata.weight_quantization import PACKAGES, explain_absence
from servekit.protocol.messages import WorkerSpec

#: The least compute capability with FP8 units: that of Ada Lovelace.
_FP8_SINCE = (8, 9)


def get_method(spec: WorkerSpec) -> str:
    """Return how the weights are quantised while they are loaded, or ""."""
    return str(spec.options.get("quantization") or "")


def make_quantization_config(folder: Path, spec: WorkerSpec) -> Any | None:
    """Return the library's configuration, or None. Raises LoadError if it cannot be."""
    if not (method := get_method(spec)):
        return None
    if stated := _read_stated(folder):
        raise LoadError(
            f"{spec.model} is quantised already, by {stated}; leave out `quantization`, or take the"
            " model that it was made of."
        )
    if importlib.util.find_spec(PACKAGES[method]) is None:
        raise LoadError(f"{spec.model}: {explain_absence(method)}")
    if method == "fp8" and torch.cuda.get_device_capability() < _FP8_SINCE:
        raise LoadError(f"{torch.cuda.get_device_name()} has no FP8 units; `int8` works there.")
    library: Any = transformers  # untyped there
    if method == "int4":
        return library.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    for name in ("torchao", "torch.utils._pytree"):  # of kernels for other GPUs and torches
        logging.getLogger(name).setLevel(logging.ERROR)
    import torchao.quantization as torchao

    if method == "fp8":
        config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    else:
        config = torchao.Int8WeightOnlyConfig()
    return library.TorchAoConfig(config)


def _read_stated(folder: Path) -> str:
    """Return the method of a model that is stored quantised, or ""."""
    try:
        stated = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(stated.get("quant_method", "a method of its own")) if stated else ""
