"""Checks before loading that a model can be spread over devices as configured."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers

from servekit.engines.transformers.tensor_parallel import messages
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

NO_ADAPTERS = (
    "This model is spread over several devices, where the transformers engine has no adapters."
)

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


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


def shared_parts(model: Any) -> dict[messages.Runs, Any]:
    """Return the parts of a model that reads media which all ranks run, in their order."""
    found: dict[messages.Runs, Any] = {
        "embedding": model.get_input_embeddings(),
        "decoder": model.get_decoder(),
        "head": model.get_output_embeddings(),
    }
    return {what: part for what, part in found.items() if part is not None}


def find_media_obstacle(model: Any) -> str:
    """Return why rank 0 alone cannot read the images and recordings of a model, or "".

    It can if the ranks share no more of the model than its `shared_parts`.
    """
    inside = {id(module) for part in shared_parts(model).values() for module in part.modules()}
    for name, module in model.named_modules():
        if _NUMBER.sub(".*", name) in model.tp_plan and id(module) not in inside:
            return f"its plan for tensor parallelism also divides {name}"
    return ""
