"""Checks of `quantization` of the transformers engine, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from servekit.config.engines.installed import Machine
from servekit.config.error_reporting import Problem
from servekit.config.schema import ModelConfig
from servekit.model_metadata.weight_quantization import PACKAGES, explain_absence


def get_method(config: ModelConfig) -> str:
    """Return how the transformers engine quantises a model's weights as it loads them, or ""."""
    return str(config.options.get("quantization") or "") if config.engine == "transformers" else ""


def check_quantization(
    config: ModelConfig, at: tuple[str | int, ...], *, is_gguf: bool
) -> Iterator[Problem]:
    """Find what a quantised model cannot have."""
    if config.engine == "vllm" and config.options.get("quantization") == "int8":
        message = "vLLM has no method of this name: write fp8, int4, or one of its own."
        yield Problem((*at, "options", "quantization"), message)
    if not (method := get_method(config)):
        return
    if is_gguf:
        message = "this file is quantised already; engine llamacpp runs it as it is."
        yield Problem((*at, "options", "quantization"), message)
    if config.adapters:
        message = f"a model with `quantization: {method}` takes no adapters; engine vllm does."
        yield Problem((*at, "adapters"), message, at_key=True)
    if config.gpus_per_replica > 1:
        message = f"a model with `quantization: {method}` is on one GPU; engine vllm spreads it."
        yield Problem((*at, "gpus_per_replica"), message)
    if config.device == "cpu" and method != "int8":
        message = (
            f"{method} needs a GPU. On a CPU there is int8, and a GGUF file with engine llamacpp is"
            " faster."
        )
        yield Problem((*at, "options", "quantization"), message)


def check_packages(
    config: ModelConfig, at: tuple[str | int, ...], machine: Machine
) -> Iterator[Problem]:
    """Find a package that is not installed, and GPUs that are not there."""
    method = get_method(config)
    if method not in PACKAGES or config.python is not None:
        return
    place = (*at, "options", "quantization")
    if not machine.has(PACKAGES[method]):
        yield Problem(place, explain_absence(method))
    elif method != "int8" and not machine.has_gpu and config.device != "cpu":
        yield Problem(place, f"{method} needs a GPU, and no NVIDIA GPU was found here.")
