"""Preparation in the fork server: every slow part of a load that needs no device.

These are the library's imports for the model's architecture, the tokenizer, and the tables for
grammars. A worker that was not forked from a fork server prepares them itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from servekit.engines.model_files.model_kind import ModelKind, find_model_kind
from servekit.engines.model_files.source import resolve_folder
from servekit.engines.text.structured_output import Grammars, try_grammars
from servekit.engines.transformers import weights
from servekit.engines.transformers.runner_factory import eos_ids, vocab_size
from servekit.engines.transformers.vision import processor
from servekit.protocol.messages import WorkerSpec


@dataclass(frozen=True)
class Prepared:
    """Prepared objects, with the inputs that they were made from."""

    folder: Path
    tokenizer: Any
    vocab_size: int = 0
    eos: frozenset[int] = frozenset()
    grammars: Grammars | None = None
    template: str = ""  # the configuration's chat template
    processor: Any = None  # of a model that reads images


#: A process prepares for one model.
_prepared: Prepared | None = None


def prepare_model(spec: WorkerSpec) -> None:
    """Prepare everything for `spec`. Raises LoadError."""
    global _prepared
    torch.set_num_threads(1)  # a forked process would not have the threads of a pool
    folder = Path(resolve_folder(spec.path, spec.revision, lambda progress: None))
    tokenizer = weights.load_tokenizer(folder, spec)
    if find_model_kind(folder, spec) != "generate":
        _prepared = Prepared(folder, tokenizer, template=spec.chat_template)
        return
    reads = processor.load_processor(folder, spec)
    with weights.explain_errors(folder, spec):
        model = _outline_model(folder, spec, "generate" if reads is None else "see")
        size, eos = vocab_size(model), eos_ids(model, tokenizer)
    made = try_grammars(lambda: Grammars(tokenizer, size, eos))
    _prepared = Prepared(folder, tokenizer, size, eos, made, spec.chat_template, reads)


def get_tokenizer(folder: Path, spec: WorkerSpec) -> Any:
    """Return the model's tokenizer, prepared or loaded now. Raises LoadError."""
    if (known := _get_prepared(folder, spec)) is not None:
        return known.tokenizer
    return weights.load_tokenizer(folder, spec)


def get_processor(folder: Path, spec: WorkerSpec) -> Any | None:
    """Return the processor of a model that reads images, prepared or loaded now."""
    if (known := _get_prepared(folder, spec)) is not None:
        return known.processor
    return processor.load_processor(folder, spec)


def _get_prepared(folder: Path, spec: WorkerSpec) -> Prepared | None:
    known = _prepared
    of = (folder, spec.chat_template)
    return known if known and (known.folder, known.template) == of else None


def get_grammars(tokenizer: Any, vocab_size: int, eos: frozenset[int]) -> Grammars | None:
    """Return the grammar compiler for a tokenizer; None if llguidance cannot read the tokenizer."""
    of = (tokenizer, vocab_size, eos)
    if (known := _prepared) and (known.tokenizer, known.vocab_size, known.eos) == of:
        return known.grammars
    return try_grammars(lambda: Grammars(tokenizer, vocab_size, eos))


def _outline_model(folder: Path, spec: WorkerSpec, kind: ModelKind) -> Any:
    """Return the model without weights, which imports its class and gives the embedding a shape."""
    model = weights.outline_model(folder, spec, kind)
    try:
        stated: Any = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # no file: the model has the library's defaults
        return model
    model.generation_config = stated
    return model
