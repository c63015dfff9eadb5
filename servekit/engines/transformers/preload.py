"""What a standby makes ahead of its workers: of a load, all that takes long and needs no device.

That is the library's imports for the model's architecture, the tokenizer, and the tables by which
grammars are kept to: two thirds of the time in which a small model comes up. A worker that was not
forked from a standby makes them itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from servekit.engines.model_files.source import resolve
from servekit.engines.text.structured_output import Grammars
from servekit.engines.transformers import pooling, weights
from servekit.engines.transformers.runner_factory import eos_ids, vocab_size
from servekit.protocol.messages import WorkerSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What was made, and of what."""

    folder: Path
    tokenizer: Any
    vocab_size: int = 0
    eos: frozenset[int] = frozenset()
    grammars: Grammars | None = None
    template: str = ""  # the configuration's chat template


#: A process prepares for one model.
_prepared: Prepared | None = None


def prepare(spec: WorkerSpec) -> None:
    """Make all of it for `spec`. Raises LoadError."""
    global _prepared
    torch.set_num_threads(1)  # the threads of a pool would not be in a fork
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
    """The model's tokenizer, prepared or loaded now. Raises LoadError."""
    of = (folder, spec.chat_template)
    if _prepared is not None and (_prepared.folder, _prepared.template) == of:
        return _prepared.tokenizer
    return weights.load_tokenizer(folder, spec)


def grammars(tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> Grammars | None:
    """What compiles grammars for this tokenizer; None for one that llguidance cannot read."""
    of = (tokenizer, vocab_size, eos)
    if (known := _prepared) and (known.tokenizer, known.vocab_size, known.eos) == of:
        return known.grammars
    return _make(tokenizer, vocab_size, eos)


def _outline(folder: Path, spec: WorkerSpec) -> Any:
    """The model without weights: its class is imported, and its embedding has a shape."""
    model = weights.outline(folder, spec)
    try:
        stated: Any = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # none: the model has the library's
        return model
    model.generation_config = stated
    return model


def _make(tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> Grammars | None:
    try:
        return Grammars(tokenizer, vocab_size, eos)
    except Exception as error:  # the library's own, of many kinds; the model serves without
        log.warning("no structured output: %s", error)
        return None
