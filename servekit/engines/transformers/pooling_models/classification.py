"""Sequence classifiers, and cross-encoders, which are those with a single label.

A step is a batch as in `embedding`. Token types, which tell the texts of a pair apart, are passed
to models that have them. The scores are those that vLLM returns: see `choose_activation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from itertools import zip_longest
from typing import Any, TypeVar

import structlog
import torch
from msgspec import structs
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.api.job_state import EmbedRow
from servekit.engines.transformers.pooling_models.embedding import (
    ROUNDING,
    PoolingRunner,
    count_batch_tokens,
    describe_pooled,
    find_context,
    padding_id,
)
from servekit.engines.transformers.pooling_models.pooling import find_activation
from servekit.errors import LoadError
from servekit.protocol.messages import Capability, ModelInfo, WorkerSpec

log: Any = structlog.get_logger(__name__)

Activation = Callable[[Tensor], Tensor]
Made = TypeVar("Made", bound="ClassificationRunner")


class ClassificationRunner(PoolingRunner):
    """Runner of rows to classify; the vector of an input has the scores of its labels."""

    def __init__(self, model: PreTrainedModel, activate: Activation, *limits: int) -> None:
        """`limits` are the padding's id, the context and the tokens in a batch."""
        super().__init__(model, *limits)
        self._activate = activate
        types = getattr(model.config.get_text_config(), "type_vocab_size", None) or 0
        self._has_types = types > 1 and "token_type_ids" in signature(model.forward).parameters

    def embed(self, texts: list[list[int]]) -> list[bytes]:
        """Return the scores of texts, one little-endian float32 vector per text."""
        _, scores = self.run_texts(texts, self._complete_types(texts, []))
        return [row.astype("<f4").tobytes() for row in scores.numpy()]

    def run_batch(self, batch: list[tuple[EmbedRow, int]]) -> list[bytes]:
        texts = [row.job.inputs[at] for row, at in batch]
        stated = [row.job.types[at] if row.job.types else [] for row, at in batch]
        types = self._complete_types(texts, stated)
        logits, scores = (each.numpy() for each in self.run_texts(texts, types))
        chosen = [logits if row.job.raw else scores for row, _ in batch]
        return [rows[place].astype("<f4").tobytes() for place, rows in enumerate(chosen)]

    def logits_of(self, texts: list[list[int]]) -> Tensor:
        """Return the logits of texts, float32 [texts, labels]."""
        return self.run_texts(texts, self._complete_types(texts, []))[0]

    def run_forward(self, ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        """Return the logits and the scores, float32 [texts, labels]."""
        more = {} if types is None else {"token_type_ids": types}
        logits: Tensor = self._model(input_ids=ids, attention_mask=mask, **more).logits.float()
        return logits, self._activate(logits)

    def _complete_types(
        self, texts: list[list[int]], stated: Sequence[Sequence[int]]
    ) -> list[Sequence[int]] | None:
        """Return the token types of each text, 0 where none are stated; None without types."""
        if not self._has_types:
            return None
        return [types or [0] * len(ids) for ids, types in zip_longest(texts, stated)]


def choose_activation(config: Any) -> Activation:
    """Return the function from logits [texts, labels] to scores. Raises LoadError.

    It is that of `problem_type`, else the one that sentence-transformers has written into the file,
    else a sigmoid for one label, and a softmax for several.
    """
    ours = getattr(config, "sentence_transformers", None) or {}
    older = getattr(config, "sbert_ce_default_activation_function", None)
    problem = getattr(config, "problem_type", None)
    named = ours.get("activation_fn") or older
    if problem == "regression":
        return _keep
    if problem == "multi_label_classification":
        return torch.sigmoid
    if problem is None and named and not named.endswith(".Softmax"):
        return find_activation(named)
    return torch.sigmoid if config.num_labels < 2 else partial(torch.softmax, dim=-1)


def _keep(logits: Tensor) -> Tensor:
    return logits


def make_classification_runner(
    model: PreTrainedModel, tokenizer: Any, spec: WorkerSpec, *, instructs: bool
) -> tuple[ClassificationRunner, ModelInfo]:
    """Return the runner for a classifier, and its properties. Raises LoadError.

    `instructs` says whether its prompt for pairs shows an instruction.
    """
    config = model.config
    if config.is_encoder_decoder:
        raise LoadError(f"{type(model).__name__} has a decoder; only encoders classify here.")
    config.use_cache = False
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:
        # the library's models for generation look for the last token before the padding
        text.pad_token_id = config.pad_token_id = tokenizer.pad_token_id
    budget = count_batch_tokens(spec) if getattr(text, "pad_token_id", None) is not None else 0
    activate = choose_activation(config)

    def make_runner(*limits: int) -> ClassificationRunner:
        return ClassificationRunner(model, activate, *limits)

    runner, context, budget = batch_texts(make_runner, model, tokenizer, spec, budget)
    names = getattr(config, "id2label", None) or {}
    labels = tuple(str(names.get(at, at)) for at in range(config.num_labels or 1))
    scores: tuple[Capability, ...] = ("score",) if len(labels) == 1 else ()
    if scores and instructs:
        scores = ("score", "instruction")
    what = f"scores of {len(labels)} label{'' if len(labels) == 1 else 's'}"
    info = describe_pooled(model, spec, context, budget, what)
    return runner, structs.replace(
        info, serves=("classify", *scores, "tokenize", "detokenize"), labels=labels
    )


def batch_texts(
    make_runner: Callable[[int, int, int], Made],
    model: PreTrainedModel,
    tokenizer: Any,
    spec: WorkerSpec,
    budget: int,
) -> tuple[Made, int, int]:
    """Return a runner, its context, and its tokens in a batch: 0 for one text at a time.

    That is so with a `budget` of 0, and for a model that reads the padding. `make_runner` takes the
    padding's id, the context and the tokens in a batch.
    """
    pad, context = padding_id(model, tokenizer), find_context(model, None, tokenizer, spec)
    runner = make_runner(pad, context, budget)
    if budget and _keeps_scores(runner):
        runner.try_graphs(spec)
        return runner, context, budget
    log.warning("texts_run_alone", model=spec.model)
    return make_runner(pad, context, 0), context, 0


def _keeps_scores(runner: ClassificationRunner) -> bool:
    """Return whether a text has the same scores alone and beside a longer one.

    Some models, such as XLNet, read the padding.
    """
    short, long = [1, 2], [1, 2, 3, 4, 3, 2] * 2
    [alone], together = (runner.logits_of(texts) for texts in ([short], [short, long]))
    return bool((alone - together[0]).abs().max() <= ROUNDING * (1 + alone.abs().max()))
