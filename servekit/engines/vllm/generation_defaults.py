"""End-of-sequence tokens and default sampling from a model's files, without loading the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from servekit.engines.text.tool_format_detection import turn_ends
from servekit.model_metadata import safetensors

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Stated:
    """The stop tokens and sampling defaults of a model.

    `eos` are all ids that end a completion, `primary` is vLLM's end-of-sequence token, `sampling`
    has the model's defaults by `Sampling` field.
    """

    eos: frozenset[int]
    primary: int | None
    sampling: dict[str, Any]


def read_defaults(folder: Path, tokenizer: Any, vocab_size: int) -> Stated:
    """Read the generation config, the model config and the tokenizer."""
    kind: Any = transformers.GenerationConfig
    try:
        own = kind.from_pretrained(folder, local_files_only=True)
    except OSError:  # no file: use the library's defaults
        own = kind()
    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    found: list[Any] = []
    for source in (tokenizer, own, config.get_text_config()):
        value = getattr(source, "eos_token_id", None)
        found += value if isinstance(value, (list, tuple)) else [value]
    found += turn_ends(tokenizer)
    known = [token for token in found if isinstance(token, int) and 0 <= token < vocab_size]
    stated = own.to_diff_dict()
    sampling = {name: stated[name] for name in _DEFAULTS if stated.get(name) is not None}
    return Stated(frozenset(known), known[0] if known else None, sampling)


def count_parameters(folder: Path) -> int:
    """Return the number of parameters in the safetensors headers; 0 if there are none."""
    try:
        return sum(safetensors.elements(folder).values())
    except (OSError, ValueError):  # random weights, or another format
        return 0
