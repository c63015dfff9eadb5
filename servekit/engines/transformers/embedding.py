"""Embeddings: texts in, one vector each out, by whatever transformer the folder holds.

A step is one forward pass over as many texts as its budget of tokens has room for, padding
counted. Requests take turns in that room, so that one with thousands of texts does not hold up one
with a single text; within a request like lengths go together.

Texts are padded on the right, whichever side the tokenizer would take. Right of it there is nothing
that a causal model could see, a bidirectional one is told by the mask, and positions count from
the text's own beginning: a text has the same vector alone and in any company.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from servekit.engines.api.base import StepOutput
from servekit.engines.api.job_state import EmbedRow as EmbedRow  # for those who import it from here
from servekit.engines.api.job_state import make_embedding_output
from servekit.engines.transformers.pooling import Pooling
from servekit.engines.transformers.runner_factory import UNSTATED_CONTEXT, spread_how
from servekit.protocol.messages import ModelInfo, WorkerSpec

#: Tokens in one forward pass. More of them only make a step longer, on a CPU very soon.
CPU_BATCH_TOKENS = 1024
CUDA_BATCH_TOKENS = 16_384
CPU_SLOTS = 32
CUDA_SLOTS = 256


class EmbeddingRunner:
    """Runs rows batch by batch; all calls come from the engine's thread."""

    def __init__(
        self, model: PreTrainedModel, pooling: Pooling, pad: int, capacity: int, budget: int
    ) -> None:
        self._model: Any = model
        self._pooling = pooling
        self._pad = pad
        self._budget = budget
        self._rows: deque[EmbedRow] = deque()
        self.capacity = capacity

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return 0

    @property
    def kv_used(self) -> float:
        return 0.0

    def add(self, row: EmbedRow) -> None:
        self._rows.append(row)

    def cancel(self, row: EmbedRow) -> None:
        self._rows = deque(other for other in self._rows if other is not row)

    def step(self) -> list[tuple[EmbedRow, StepOutput]]:
        """One batch; returns the rows that it has completed."""
        batch = self._take()
        vectors = self.embed([row.job.inputs[index] for row, index in batch])
        for (row, index), vector in zip(batch, vectors, strict=True):
            row.vectors[index] = vector
        first = self._rows[0]
        done = [row for row in self._rows if not row.left]
        self._rows = deque(row for row in self._rows if row.left)
        if self._rows and self._rows[0] is first:
            self._rows.rotate(-1)
        return [(row, make_embedding_output(row.job.id, row.vectors)) for row in done]

    @torch.no_grad()
    def embed(self, texts: list[list[int]]) -> list[bytes]:
        """One forward pass; a vector each, float32, little-endian."""
        longest = max(map(len, texts))
        ids = torch.tensor([text + [self._pad] * (longest - len(text)) for text in texts])
        lengths = torch.tensor([[len(text)] for text in texts])
        mask = (torch.arange(longest) < lengths).long()
        device = self._model.device
        ids, mask = ids.to(device), mask.to(device)
        hidden: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        vectors = self._pooling(hidden, mask).cpu().numpy()
        return [vector.astype("<f4").tobytes() for vector in vectors]

    def make_pages(self) -> None:
        """There are none."""

    def drop_pages(self) -> None:
        """There are none."""

    def tensors(self) -> Iterable[Tensor]:
        """Weights that are not the transformer's."""
        return self._pooling.tensors()

    def close(self) -> None:
        self._rows.clear()

    def _take(self) -> list[tuple[EmbedRow, int]]:
        """Texts for one batch: at least one, and then while the padded batch is in budget."""
        batch: list[tuple[EmbedRow, int]] = []
        longest = 0
        for row in self._rows:
            while row.left:
                wider = max(longest, len(row.job.inputs[row.left[0]]))
                if batch and wider * (len(batch) + 1) > self._budget:
                    break
                longest = wider
                batch.append((row, row.left.popleft()))
        return batch


def assemble(
    model: PreTrainedModel, pooling: Pooling, tokenizer: Any, spec: WorkerSpec
) -> tuple[EmbeddingRunner, ModelInfo]:
    """The runner for an embedding model, and what it can do."""
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    model.config.use_cache = False
    cuda = spec.device == "cuda"
    stated = spec.options.get("max_batch_tokens")
    budget = stated or (CUDA_BATCH_TOKENS if cuda else CPU_BATCH_TOKENS)
    context = _context(model, pooling, tokenizer, spec)
    runner = EmbeddingRunner(model, pooling, _padding(model, tokenizer), context, budget)
    attention = model.config._attn_implementation
    size = len(runner.embed([[0, 1], [1]])[0]) // 4
    return runner, ModelInfo(
        max_context=context,
        slots=spec.options.get("slots") or (CUDA_SLOTS if cuda else CPU_SLOTS),
        chat=False,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        detail=f"embeddings of {size}, {attention}, {budget} tokens a batch{spread_how(spec)}",
        sleeps=True,
        serves=("embed", "tokenize", "detokenize"),
        embedding_size=size,
    )


def _padding(model: PreTrainedModel, tokenizer: Any) -> int:
    """What RoBERTa and its like find their positions by, so it has to be the model's own."""
    for source in (model.config, tokenizer):
        value = getattr(source, "pad_token_id", None)
        if isinstance(value, int) and value >= 0:
            return value
    return 0


def _context(model: PreTrainedModel, pooling: Pooling, tokenizer: Any, spec: WorkerSpec) -> int:
    """The least of all limits that are stated: of positions, by its makers, in the file."""
    limits = [
        _positions(model),
        pooling.max_tokens,
        getattr(tokenizer, "model_max_length", None),
        spec.max_context,
    ]
    return int(min(limit for limit in limits if limit is not None and limit > 0))


def _positions(model: PreTrainedModel) -> int:
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - offset  # RoBERTa counts from behind its padding
    return stated if isinstance(stated, int) and stated > 0 else UNSTATED_CONTEXT
