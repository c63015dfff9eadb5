"""Quantisation of the weights while a model is loaded, by torchao or bitsandbytes.

    int8    torchao: weights in 8 bits with a scale for each row, products in the model's type
    fp8     torchao: weights and their inputs in 8 bits, products by the GPU's FP8 units
    int4    bitsandbytes: weights in 4 bits (NF4), unpacked for each product

Linear layers of the transformer are quantised; embeddings, the head and norms stay as they are.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from servekit.engines.model_files.model_kind import ModelKind
from servekit.errors import LoadError
from servekit.model_metadata.weight_quantization import PACKAGES, explain_absence
from servekit.protocol.messages import WorkerSpec

NO_ADAPTERS = "The weights of this model are quantised, and take no adapters."
#: The least compute capability with FP8 units: that of Ada Lovelace.
_FP8_SINCE = (8, 9)


def get_method(spec: WorkerSpec) -> str:
    """Return how the weights are quantised while they are loaded, or ""."""
    return str(spec.options.get("quantization") or "")


def loading_arguments(folder: Path, spec: WorkerSpec, kind: ModelKind) -> dict[str, Any]:
    """Return the library's arguments that quantise a model. Raises LoadError if it cannot be.

    None instead of no argument would make it forget how a model is stored.
    """
    config = make_quantization_config(folder, spec, kind)
    return {} if config is None else {"quantization_config": config}


def make_quantization_config(
    folder: Path, spec: WorkerSpec, kind: ModelKind = "generate"
) -> Any | None:
    """Return the library's configuration, or None. Raises LoadError if it cannot be."""
    if not (method := get_method(spec)):
        return None
    if kind not in ("generate", "see"):
        raise LoadError(
            f"options.quantization is for models that write text; {spec.model} is of another kind."
        )
    if stated := read_stated_method(folder):
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
            bnb_4bit_compute_dtype=getattr(torch, spec.dtype, torch.bfloat16),
        )
    import torchao.quantization as torchao

    # Otherwise torchao sets options of torch for the whole process, such as products in TF32.
    plain: dict[str, Any] = {"set_inductor_config": False}
    if method == "fp8":
        config = torchao.Float8DynamicActivationFloat8WeightConfig(
            granularity=torchao.PerRow(), **plain
        )
    else:
        config = torchao.Int8WeightOnlyConfig(**plain)
    return library.TorchAoConfig(config)


def has_packed_weights(model: nn.Module) -> bool:
    """Return whether some weights are of a library's own class: torchao's, bitsandbytes'.

    A copy of such a weight as a plain one would lose its scales.
    """
    return any(_is_packed(weight) for weight in model.parameters())


def can_reload(model: nn.Module) -> bool:
    """Return whether weights that are read again fit into the memory of those that are there.

    bitsandbytes brings weights on a CPU into another order when they are first used.
    """
    return not any(_is_packed(one) and hasattr(one, "quant_state") for one in model.parameters())


def _is_packed(weight: Tensor) -> bool:
    return type(weight) is not nn.Parameter and not hasattr(weight, "_local_tensor")


def read_stated_method(folder: Path) -> str:
    """Return the method of a model that is stored quantised, or ""."""
    try:
        stated = json.loads((folder / "config.json").read_bytes()).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(stated.get("quant_method", "a method of its own")) if stated else ""
