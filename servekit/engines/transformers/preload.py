"""Preparation in the fork server: every slow part of a load that needs no device.

These are the library's imports for the model's architecture, the tokenizer, and the tables for
grammars. A worker that was not forked from a fork server prepares them itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import transformers

from servekit.engines.model_files.source import resolve
from servekit.engines.text.structured_output import Grammars
from servekit.engines.transformers import pooling, weights
from servekit.engines.transformers.runner_factory import eos_ids, vocab_size
from servekit.protocol.messages import WorkerSpec

log: Any = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Prepared objects, with the inputs that they were made from."""

    folder: Path
    tokenizer: Any
    vocab_size: int = 0
    eos: frozenset[int] = frozenset()
    grammars: Grammars | None = None
    template: str = ""  # the configuration's chat template


#: A process prepares for one model.
_prepared: Prepared | None = None


def prepare(spec: WorkerSpec) -> None:
    """Prepare everything for `spec`. Raises LoadError."""
    global _prepared
    torch.set_num_threads(1)  # a forked process would not have the threads of a pool
    folder = Path(resolve(spec.path, spec.revision, lambda progress: None))
    tokenizer = weights.load_tokenizer(folder, spec)
    if pooling.is_embedder(folder):
        _prepared = Prepared(folder, tokenizer, template=spec.chat_template)
        return
    with weights.explained(folder, spec):
        model = _outline(folder, spec)
        size, eos = vocab_size(model), eos_ids(model, tokenizer)
    made = _make(tokenizer, size, eos)
    _prepared = Prepared(folder, tokenizer, size, eos, made, spec.chat_template)


def tokenizer(folder: Path, spec: WorkerSpec) -> Any:
    """Return the model's tokenizer, prepared or loaded now. Raises LoadError."""
    of = (folder, spec.chat_template)
    if _prepared is not None and (_prepared.folder, _prepared.template) == of:
        return _prepared.tokenizer
    return weights.load_tokenizer(folder, spec)


def grammars(tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> Grammars | None:
    """Return the grammar compiler for a tokenizer; None if llguidance cannot read the tokenizer."""
    of = (tokenizer, vocab_size, eos)
    if (known := _prepared) and (known.tokenizer, known.vocab_size, known.eos) == of:
        return known.grammars
    return _make(tokenizer, vocab_size, eos)


def _outline(folder: Path, spec: WorkerSpec) -> Any:
    """Return the model without weights, which imports its class and gives the embedding a shape."""
    model = weights.outline(folder, spec)
    try:
        stated: Any = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # no file: the model has the library's defaults
        return model
    model.generation_config = stated
    return model


def _make(tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> Grammars | None:
    try:
        return Grammars(tokenizer, vocab_size, eos)
    except Exception as error:  # of many kinds; the model serves without
        log.warning("structured_output_unavailable", reason=str(error))
        return None
