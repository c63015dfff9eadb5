"""Checks before loading that a model can be spread over devices as configured."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

NO_ADAPTERS = (
    "This model is spread over several devices, where the transformers engine has no adapters."
)


def is_spread(spec: WorkerSpec) -> bool:
    return spec.gpus > 1 and bool(spec.parallel)


def over_ranks(spec: WorkerSpec) -> bool:
    """Return whether the model is spread over one process per device."""
    return is_spread(spec) and spec.parallel == "tensor"


def over_layers(spec: WorkerSpec) -> bool:
    """Return whether the model is spread by layers, in one process. A CPU is one device."""
    return is_spread(spec) and spec.parallel == "device_map" and spec.device == "cuda"


def check_spread(model: Any, spec: WorkerSpec) -> None:
    """Raise LoadError if the ranks could not share this model, which may be without weights."""
    if not torch.distributed.is_available():
        raise LoadError(
            "This build of torch has no torch.distributed, which tensor parallel needs."
        )
    instead = f"`parallel: device_map` for {spec.model}"
    # Rank 0 runs a part of these models by itself.
    if not model.tp_plan or model.config.is_encoder_decoder:
        raise LoadError(
            f"transformers {transformers.__version__} has no plan for tensor parallelism of "
            f"{type(model).__name__}; write {instead}."
        )
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % spec.gpus or kv_heads % spec.gpus:
        raise LoadError(
            f"{spec.model} has {heads} attention heads and {kv_heads} of keys and values, which "
            f"{spec.gpus} devices cannot share evenly; choose another `gpus_per_replica`, "
            f"or write {instead}."
        )
