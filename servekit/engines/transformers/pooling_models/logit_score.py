"""Causal rerankers: language models whose next token says whether a document fits a query.

The logit of a pair is the difference of the logits of two tokens, such as yes and no, after its
prompt (see `engines.text.pair_template`). Its sigmoid is the softmax over the two.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor
from transformers import PreTrainedModel

from servekit.engines.model_files.model_kind import ScoreTokens, read_json, read_score_tokens
from servekit.engines.transformers.pooling_models.classification import (
    Activation,
    ClassificationRunner,
    batch_texts,
)
from servekit.engines.transformers.pooling_models.embedding import (
    count_batch_tokens,
    describe_pooled,
)
from servekit.engines.transformers.pooling_models.pooling import find_activation
from servekit.errors import LoadError
from servekit.protocol.messages import Capability, ModelInfo, WorkerSpec


class LogitScoreRunner(ClassificationRunner):
    """Runner of pairs; the vector of a pair is its one score.

    The model gets texts with padding on the left, so that the last position is of each text, and
    the head is run there alone.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: ScoreTokens,
        activate: Activation,
        *limits: int,
    ) -> None:
        super().__init__(model, activate, *limits)
        self._tokens = tokens
        self._last: dict[str, Any] = {}
        if "logits_to_keep" in signature(model.forward).parameters:
            self._last = {"logits_to_keep": 1}

    def run_forward(self, ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        tokens = ids.shape[1]
        moved = (torch.arange(tokens, device=ids.device) + mask.sum(1, keepdim=True)) % tokens
        ids, mask = ids.gather(1, moved), mask.gather(1, moved)
        logits: Tensor = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            **self._last,
        ).logits[:, -1]
        score = logits[:, self._tokens.true_token_id].float()
        if self._tokens.false_token_id is not None:
            score = score - logits[:, self._tokens.false_token_id].float()
        return score[:, None], self._activate(score[:, None])


def find_score_tokens(folder: Path, tokenizer: Any, model: str) -> ScoreTokens:
    """Return the tokens that the files name, else those of yes and no. Raises LoadError."""
    stated = read_score_tokens(folder)
    if stated is None:
        known = tokenizer.get_vocab()
        if lacking := [word for word in ("yes", "no") if word not in known]:
            raise LoadError(
                f"The tokenizer of {model} has no token '{lacking[0]}', so the model cannot be a"
                " reranker that answers yes or no."
            )
        return ScoreTokens(known["yes"], known["no"])
    size = len(tokenizer)
    for token in (stated.true_token_id, stated.false_token_id):
        if token is not None and not 0 <= token < size:
            raise LoadError(f"{model} scores by token {token}, and its tokenizer has {size}.")
    return stated


def read_activation(folder: Path) -> str:
    """Return the name of the function that sentence-transformers has written; "": a sigmoid."""
    stated = read_json(folder / "config_sentence_transformers.json")
    named = stated.get("activation_fn") if isinstance(stated, dict) else None
    return str(named or "")


def make_logit_score_runner(
    folder: Path, model: PreTrainedModel, tokenizer: Any, spec: WorkerSpec, *, instructs: bool
) -> tuple[LogitScoreRunner, ModelInfo]:
    """Return the runner for a causal reranker, and its properties. Raises LoadError.

    `instructs` says whether its prompt shows an instruction.
    """
    tokens = find_score_tokens(folder, tokenizer, spec.model)
    named = read_activation(folder)
    activate = find_activation(named) if named else torch.sigmoid
    model.config.use_cache = False

    def make_runner(*limits: int) -> LogitScoreRunner:
        return LogitScoreRunner(model, tokens, activate, *limits)

    runner, context, budget = batch_texts(
        make_runner, model, tokenizer, spec, count_batch_tokens(spec)
    )
    pair = [tokens.true_token_id, tokens.false_token_id]
    names = [repr(tokenizer.decode([token])) for token in pair if token is not None]
    info = describe_pooled(model, spec, context, budget, f"scores by {' and '.join(names)}")
    more: tuple[Capability, ...] = ("instruction",) if instructs else ()
    return runner, structs.replace(
        info, serves=("score", *more, "tokenize", "detokenize"), labels=("LABEL_0",)
    )
