"""What a model's files say of how it ends and samples, without the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from servekit.engines.text.structured_output import Grammars
from servekit.engines.text.tool_format_detection import turn_ends
from servekit.model_metadata import safetensors

log = logging.getLogger(__name__)

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Stated:
    """`eos` are all ids that end a completion, `primary` the one that vLLM treats as such.

    `sampling` is what the model asks for, by `Sampling` field.
    """

    eos: frozenset[int]
    primary: int | None
    sampling: dict[str, Any]


def read(folder: Path, tokenizer: Any, vocab_size: int) -> Stated:
    """From the generation config, the config and the tokenizer, whichever say something."""
    kind: Any = transformers.GenerationConfig
    try:
        own = kind.from_pretrained(folder, local_files_only=True)
    except OSError:  # none: the model has the library's
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


def parameters(folder: Path) -> int:
    """How many numbers its weights have, by their headers; 0 where there are none to read."""
    try:
        return sum(safetensors.elements(folder).values())
    except (OSError, ValueError):  # random ones, or of another format
        return 0


def grammars(tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> Grammars | None:
    """What compiles grammars; None for a tokenizer that llguidance cannot read."""
    try:
        return Grammars(tokenizer, vocab_size, eos)
    except Exception as error:  # the library's own, of many kinds; the model serves without
        log.warning("no structured output: %s", error)
        return None
