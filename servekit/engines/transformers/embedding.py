"""Embeddings: one vector per text, by any transformer with a pooling configuration.

A step is one forward pass over as many texts as fit into its token budget, padding included;
within a request, texts of similar length are batched together.

Texts are padded on the right, whatever the tokenizer's padding side. A causal model cannot see
tokens to the right, a bidirectional model has the attention mask, and positions count from the
start of the text: so the vector of a text does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from servekit.engines.api.job_state import EmbedRow, EmbedRunner
from servekit.engines.transformers.pooling import Pooling
from servekit.engines.transformers.runner_factory import UNSTATED_CONTEXT, spread_how
from servekit.protocol.messages import ModelInfo, WorkerSpec

#: Tokens in one forward pass. Beyond these limits a step only takes longer, on a CPU sooner.
CPU_BATCH_TOKENS = 1024
CUDA_BATCH_TOKENS = 16_384
CPU_SLOTS = 32
CUDA_SLOTS = 256


class EmbeddingRunner(EmbedRunner):
    """Runner of embedding rows; a padded batch has at most `budget` tokens, or a single text."""

    def __init__(
        self, model: PreTrainedModel, pooling: Pooling, pad: int, capacity: int, budget: int
    ) -> None:
        super().__init__()
        self._model: Any = model
        self._pooling = pooling
        self._pad = pad
        self._budget = budget
        self.capacity = capacity

    @torch.no_grad()
    def embed(self, texts: list[list[int]]) -> list[bytes]:
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
        """Do nothing: embeddings have no KV cache."""

    def drop_pages(self) -> None:
        """Do nothing: embeddings have no KV cache."""

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights of the layers that follow the transformer."""
        return self._pooling.tensors()

    def _take_batch(self) -> list[tuple[EmbedRow, int]]:
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


def make_embedding_runner(
    model: PreTrainedModel, pooling: Pooling, tokenizer: Any, spec: WorkerSpec
) -> tuple[EmbeddingRunner, ModelInfo]:
    """Return the runner for an embedding model, and its properties."""
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    model.config.use_cache = False
    cuda = spec.device == "cuda"
    stated = spec.options.get("max_batch_tokens")
    budget = stated or (CUDA_BATCH_TOKENS if cuda else CPU_BATCH_TOKENS)
    context = _find_context(model, pooling, tokenizer, spec)
    runner = EmbeddingRunner(model, pooling, _padding_id(model, tokenizer), context, budget)
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


def _padding_id(model: PreTrainedModel, tokenizer: Any) -> int:
    """Return the padding token's id.

    The model's own id comes first, because RoBERTa and similar models derive positions from it.
    """
    for source in (model.config, tokenizer):
        value = getattr(source, "pad_token_id", None)
        if isinstance(value, int) and value >= 0:
            return value
    return 0


def _find_context(
    model: PreTrainedModel, pooling: Pooling, tokenizer: Any, spec: WorkerSpec
) -> int:
    """Return the smallest of the stated limits, including the number of position embeddings."""
    limits = [
        _count_positions(model),
        pooling.max_tokens,
        getattr(tokenizer, "model_max_length", None),
        spec.max_context,
    ]
    return int(min(limit for limit in limits if limit is not None and limit > 0))


def _count_positions(model: PreTrainedModel) -> int:
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - offset  # RoBERTa's begin after its padding
    return stated if isinstance(stated, int) and stated > 0 else UNSTATED_CONTEXT
