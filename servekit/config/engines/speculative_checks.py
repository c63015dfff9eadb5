"""Checks of `speculative`, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servekit.config import paths
from servekit.config.error_reporting import Problem
from servekit.config.schema import ModelConfig

#: Engines with the option; other engines have their own names for it.
_ENGINES = ("transformers", "llamacpp")


def get_speculative(config: ModelConfig) -> dict[str, Any]:
    """Return the option of a model whose engine has it; {} if it has none."""
    found = config.options.get("speculative") if config.engine in _ENGINES else None
    return found if isinstance(found, dict) else {}


def check_speculative(
    config: ModelConfig, at: tuple[str | int, ...], folder: Path
) -> Iterator[Problem]:
    """Find what a model with speculative decoding cannot have, and a draft model that is none."""
    if not (asked := get_speculative(config)):
        return
    options = config.options
    if options.get("batching") == "static":
        message = "speculative decoding needs continuous batching: leave one of them out."
        yield Problem((*at, "options", "batching"), message)
    if options.get("decode") == "eager":
        message = "speculative decoding is part of servekit's own decoding: leave one of them out."
        yield Problem((*at, "options", "decode"), message)
    if options.get("attention"):
        message = "speculative decoding needs the default attention: leave one of them out."
        yield Problem((*at, "options", "attention"), message)
    if options.get("task") == "rerank":
        message = "a reranker generates no text to speculate about."
        yield Problem((*at, "options", "speculative"), message, at_key=True)
    if options.get("pooling", "auto") not in ("auto", "none"):
        message = "a model that makes embeddings or scores has no text to speculate about."
        yield Problem((*at, "options", "speculative"), message, at_key=True)
    if config.gpus_per_replica > 1 and config.engine == "transformers":
        message = "a model with `speculative` is on one GPU; engine vllm spreads it."
        yield Problem((*at, "gpus_per_replica"), message)
    if model := asked.get("model"):
        here = (*at, "options", "speculative", "model")
        try:
            found = paths.check_model_path(str(model), folder)
        except ValueError as error:
            yield Problem(here, f"{error}.")
            return
        if config.engine == "llamacpp" and not found.is_gguf:
            yield Problem(here, "the engine llamacpp loads GGUF files, and this is none.")
