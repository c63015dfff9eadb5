"""Embeddings: one vector per text, by any transformer with a pooling configuration.

A step is one forward pass over as many texts as fit into its token budget, padding included: the
longest one of the request whose turn it is, and texts of similar length of all requests.

Texts are padded on the right, whatever the tokenizer's padding side. A causal model cannot see
tokens to the right, a bidirectional model has the attention mask, and positions count from the
start of the text: so the vector of a text does not depend on the rest of the batch.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import structlog
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import PreTrainedModel

from servekit.engines.api.job_state import EmbedRow, EmbedRunner
from servekit.engines.transformers.pooling_models.pooling import Pooling
from servekit.engines.transformers.pooling_models.shape_graphs import ShapeGraphs
from servekit.engines.transformers.runner_factory import UNSTATED_CONTEXT, spread_how
from servekit.protocol.messages import ModelInfo, WorkerSpec

log: Any = structlog.get_logger(__name__)

#: Tokens in one forward pass. Beyond these limits a step only takes longer, on a CPU sooner.
CPU_BATCH_TOKENS = 1024
CUDA_BATCH_TOKENS = 32_768
#: The least length of a text, as a share of the longest one in its batch, once the batch has this
#: share of its most tokens. A smaller batch costs more than the padding that it saves: a GPU takes
#: as long to have all its kernels started as to compute some 10,000 tokens of a large encoder.
_SIMILAR = 0.75
_ENOUGH, _ENOUGH_ON_CUDA = 0.25, 0.75
#: Tokens of the largest batch with a graph, and the smallest such limit. A larger one takes a GPU
#: longer than it takes to start its kernels.
_GRAPH_TOKENS, _LEAST_GRAPH_TOKENS = 8192, 512
#: The first share above, and the tokens of similar texts that run in one batch without a graph, and
#: so without more padding, where graphs start the kernels; of the tokens of the largest graph.
_ENOUGH_BY_GRAPHS, _ENOUGH_WITHOUT_GRAPHS = 0.5, 1.5
#: Rows whose texts are looked at for a batch.
_ROWS_PER_BATCH = 32
#: The largest difference of vectors that counts as rounding, in low precision.
ROUNDING = 0.05
CPU_SLOTS = 32
CUDA_SLOTS = 256


class PoolingRunner(EmbedRunner):
    """Runner of texts in padded batches, which have at most `budget` tokens, or a single text."""

    def __init__(self, model: PreTrainedModel, pad: int, capacity: int, budget: int) -> None:
        super().__init__()
        self._model: Any = model
        self._pad = pad
        self._budget = budget
        self._graph_tokens = 0  # of the largest batch with a graph; 0: there are none
        self._graphs: ShapeGraphs | None = None
        self.capacity = capacity

    @abstractmethod
    def run_forward(self, ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        """Return the outputs of texts, float32 [texts, …].

        The arguments are [texts, tokens], with padding on the right; `mask` is 1 for a token.
        """

    @torch.no_grad()
    def run_texts(
        self, texts: list[list[int]], types: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, ...]:
        """Return the outputs of texts, on the CPU, float32 [texts, …].

        `types` are the token types of each text, or None for models without.
        """
        device = self._model.device
        run = self._graphs.run_shape if self._graphs else self.run_forward
        ids, mask = self._pad_texts(texts, self._pad)
        kinds = None if types is None else self._pad_texts(types, 0)[0].to(device)
        return tuple(output.cpu() for output in run(ids.to(device), mask.to(device), kinds))

    @staticmethod
    def _pad_texts(texts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
        """Return the ids, with padding on the right, and the mask, both [texts, tokens]."""
        longest = max(map(len, texts))
        lengths = torch.tensor([[len(text)] for text in texts])
        mask = torch.arange(longest) < lengths
        ids = torch.full(mask.shape, pad)
        ids[mask] = torch.tensor([*chain.from_iterable(texts)], dtype=torch.long)
        return ids, mask.long()

    def try_graphs(self, spec: WorkerSpec) -> None:
        """Run small batches by CUDA graphs from now on, if that leaves vectors as they are.

        The device must be one GPU, and the file must not ask for eager decoding.
        """
        if spec.device != "cuda" or spec.gpus > 1 or spec.options.get("decode") == "eager":
            return
        texts = [[1, 2], [1, 2, 3, 2]]
        due = self._embed_arrays(texts)
        self._graph_tokens = self._count_graph_tokens()
        self.make_pages()
        for _ in range(3):  # without a graph, recorded, replayed
            made = self._embed_arrays(texts)
            failed = self._graphs is None or self._graphs.failure
            if failed or not np.allclose(made, due, rtol=ROUNDING, atol=ROUNDING):
                log.warning("texts_run_without_graphs", model=spec.model)
                self._graph_tokens = 0
                self.drop_pages()
                return

    def _count_graph_tokens(self) -> int:
        """Return the tokens that take the GPU half as long again as the start of its kernels."""
        size = min(self.capacity, _GRAPH_TOKENS // 32)
        short, long = [[1, 2]], [[1] * size] * (_GRAPH_TOKENS // size)
        short_s, long_s = (
            min(self._time_batch(texts) for _ in range(3)) for texts in (short, long)
        )
        tokens = int(_GRAPH_TOKENS * 1.5 * short_s / long_s)
        return max(_LEAST_GRAPH_TOKENS, min(_GRAPH_TOKENS, tokens))

    def _time_batch(self, texts: list[list[int]]) -> float:
        began_s = time.perf_counter()
        self.embed(texts)
        return time.perf_counter() - began_s

    def _embed_arrays(self, texts: list[list[int]]) -> list[np.ndarray[Any, Any]]:
        return [np.frombuffer(vector, "<f4") for vector in self.embed(texts)]

    def make_pages(self) -> None:
        """Prepare for graphs; there is no KV cache."""
        if self._graph_tokens:
            self._graphs = ShapeGraphs(
                self.run_forward, self._model.device, self._pad, self._graph_tokens
            )

    def drop_pages(self) -> None:
        """Free the graphs, which hold the addresses of weights."""
        self._graphs = None

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights that are not the model's own."""
        return ()

    def _take_batch(self) -> list[tuple[EmbedRow, int]]:
        rows = [*islice(self._rows, _ROWS_PER_BATCH)]
        longest = len(rows[0].job.inputs[rows[0].left[0]])
        budget, enough = self._budget, self._budget * _ENOUGH
        if self._graphs is not None:
            budget = self._choose_budget(rows, longest)
            enough = self._graph_tokens * _ENOUGH_BY_GRAPHS
        elif self._model.device.type == "cuda":
            enough = budget * _ENOUGH_ON_CUDA
        most, some = (max(1, int(tokens // longest)) for tokens in (budget, min(enough, budget)))
        batch: list[tuple[EmbedRow, int]] = []
        for least, room in ((_SIMILAR * longest, most), (0, some)):
            for row in rows:
                self._take_texts(row, batch, range(int(least), longest + 1), room)
        return batch

    def _choose_budget(self, rows: list[EmbedRow], longest: int) -> int:
        """Return the tokens of a batch by a graph, or more if that many are similar."""
        similar = range(int(_SIMILAR * longest), longest + 1)
        count = sum(len(row.job.inputs[at]) in similar for row in rows for at in row.left)
        if count * longest < self._graph_tokens * _ENOUGH_WITHOUT_GRAPHS:
            return min(self._budget, self._graph_tokens)
        return self._budget

    @staticmethod
    def _take_texts(
        row: EmbedRow, batch: list[tuple[EmbedRow, int]], lengths: range, room: int
    ) -> None:
        """Move texts of these lengths from a row to the batch, until it has `room` texts."""
        kept: deque[int] = deque()
        for index in row.left:
            if len(batch) < room and len(row.job.inputs[index]) in lengths:
                batch.append((row, index))
            else:
                kept.append(index)
        row.left = kept


class EmbeddingRunner(PoolingRunner):
    """Runner of embedding rows."""

    def __init__(
        self, model: PreTrainedModel, pooling: Pooling, pad: int, capacity: int, budget: int
    ) -> None:
        super().__init__(model, pad, capacity, budget)
        self._pooling = pooling

    def run_forward(self, ids: Tensor, mask: Tensor, types: Tensor | None) -> tuple[Tensor, ...]:
        hidden: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        return (self._pooling(hidden, mask),)

    def embed(self, texts: list[list[int]]) -> list[bytes]:
        return [vector.astype("<f4").tobytes() for vector in self.run_texts(texts)[0].numpy()]

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights of the layers that follow the transformer."""
        return self._pooling.tensors()


def make_embedding_runner(
    model: PreTrainedModel, pooling: Pooling, tokenizer: Any, spec: WorkerSpec
) -> tuple[EmbeddingRunner, ModelInfo]:
    """Return the runner for an embedding model, and its properties."""
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    model.config.use_cache = False
    budget = count_batch_tokens(spec)
    context = find_context(model, pooling.max_tokens, tokenizer, spec)
    runner = EmbeddingRunner(model, pooling, padding_id(model, tokenizer), context, budget)
    size = len(runner.embed([[0, 1], [1]])[0]) // 4
    runner.try_graphs(spec)
    info = describe_pooled(model, spec, context, budget, f"embeddings of {size}")
    return runner, replace(info, serves=("embed", "tokenize", "detokenize"), embedding_size=size)


def count_batch_tokens(spec: WorkerSpec) -> int:
    """Return the most tokens in one forward pass."""
    default = CUDA_BATCH_TOKENS if spec.device == "cuda" else CPU_BATCH_TOKENS
    return int(spec.options.get("max_batch_tokens") or default)


def describe_pooled(
    model: PreTrainedModel, spec: WorkerSpec, context: int, budget: int, what: str
) -> ModelInfo:
    """Return the properties of a model that generates nothing, without its tasks.

    `what` tells people what it makes; a `budget` of 0 is a single text.
    """
    attention = model.config._attn_implementation
    batch = f"{budget} tokens a batch" if budget else "one text at a time"
    return ModelInfo(
        max_context=context,
        slots=spec.options.get("slots") or (CUDA_SLOTS if spec.device == "cuda" else CPU_SLOTS),
        chat=False,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        detail=f"{what}, {attention}, {batch}{spread_how(spec)}",
        sleeps=True,
    )


def padding_id(model: PreTrainedModel, tokenizer: Any) -> int:
    """Return the padding token's id.

    The model's own id comes first, because RoBERTa and similar models derive positions from it.
    """
    for source in (model.config, tokenizer):
        value = getattr(source, "pad_token_id", None)
        if isinstance(value, int) and value >= 0:
            return value
    return 0


def find_context(
    model: PreTrainedModel, max_tokens: int | None, tokenizer: Any, spec: WorkerSpec
) -> int:
    """Return the smallest of the stated limits, including the number of position embeddings."""
    limits = [
        _count_positions(model),
        max_tokens,
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
