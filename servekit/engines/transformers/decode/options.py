"""Choice of whether servekit decodes a model's single-token steps, and with which kernel."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from servekit.engines.transformers.batching import kv_cache, paged_attention
from servekit.engines.transformers.decode import kernels
from servekit.engines.transformers.decode.decode_loop import StepOptions
from servekit.protocol.messages import WorkerSpec


def wish(model: PreTrainedModel, spec: WorkerSpec, context: int, block_size: int) -> StepOptions:
    """Return how to decode this model.

    Raises LookupError with the reason if the library must decode it. On a CPU nothing is gained by
    starting steps early, so there the user must request it.
    """
    how = spec.options.get("decode") or "auto"
    if how == "eager":
        raise LookupError("")
    device: torch.device = model.device
    if device.type != "cuda" and how == "auto":
        raise LookupError("")
    config = model.config.get_text_config()
    if model.config._attn_implementation != "sdpa" or spec.options.get("attention"):
        raise LookupError("options.attention is set to one without pages")
    if spec.gpus > 1:
        raise LookupError("it is spread over several GPUs")
    if not paged_attention.suits(config):
        raise LookupError("some of its layers do not attend to the whole context")
    shape = kv_cache.shape_of(config, model.dtype.itemsize)
    asked = kernels.Shape(
        shape.heads, shape.kv_heads, shape.head_dim, block_size, model.dtype, device
    )
    named = spec.options.get("decode_attention") or "auto"
    if device.type != "cuda" and named == "auto":
        named = "reference"
    kernel = kernels.choose(named, asked)
    on_gpu = device.type == "cuda"
    return StepOptions(kernel, context, graphs=on_gpu and kernel.captured, ahead=on_gpu)
