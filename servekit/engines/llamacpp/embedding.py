"""Embeddings and scores by llama.cpp: one vector per text, pooled as the model's file says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from servekit.engines.api.job_state import EmbedRow, EmbedRunner
from servekit.engines.llamacpp.model import Context


class LlamaEmbedder(EmbedRunner):
    """A runner of embedding jobs on a context of llama.cpp."""

    def __init__(self, context: Context, step_tokens: int) -> None:
        """Store the limit `step_tokens` of one pass, which a single text may exceed."""
        super().__init__()
        self._context = context
        self._step_tokens = step_tokens

    def close(self) -> None:
        super().close()
        self._context.close()

    def embed(self, texts: list[list[int]]) -> list[bytes]:
        vectors = self._pool(texts)
        return [_normalise_vector(vector).astype("<f4").tobytes() for vector in vectors]

    def _pool(self, texts: list[list[int]], size: int = 0) -> list[NDArray[np.float32]]:
        """Return the pooled vectors of texts, of `size` numbers; 0: as many as an embedding has."""
        context = self._context
        context.clear_batch()
        for sequence, ids in enumerate(texts):
            context.put(sequence, 0, ids, output=True)
        context.decode_batch()
        vectors = [context.embedding(sequence, size) for sequence in range(len(texts))]
        context.clear_cache()
        if len(texts) > 1 and any(np.isnan(vector).any() for vector in vectors):
            # it may be another text's NaN; see `generation`
            return [vector for text in texts for vector in self._pool([text], size)]
        return vectors

    def _take_batch(self) -> list[tuple[EmbedRow, int]]:
        batch: list[tuple[EmbedRow, int]] = []
        tokens = 0
        for row in self._rows:
            while row.left and len(batch) < self._context.sequences:
                tokens += len(row.job.inputs[row.left[0]])
                if batch and tokens > self._step_tokens:
                    return batch
                batch.append((row, row.left.popleft()))
        return batch


class LlamaClassifier(LlamaEmbedder):
    """A runner of jobs to classify, or to score, on a context of llama.cpp."""

    def __init__(self, context: Context, step_tokens: int, labels: int, *, activated: bool) -> None:
        """Store the number of labels, and whether llama.cpp itself makes scores of the logits."""
        super().__init__(context, step_tokens)
        self._labels = labels
        self._activated = activated

    def embed(self, texts: list[list[int]]) -> list[bytes]:
        return [self._score(row).astype("<f4").tobytes() for row in self._pool(texts, self._labels)]

    def run_batch(self, batch: list[tuple[EmbedRow, int]]) -> list[bytes]:
        logits = self._pool([row.job.inputs[at] for row, at in batch], self._labels)
        scores = [
            one if row.job.raw else self._score(one)
            for (row, _), one in zip(batch, logits, strict=True)
        ]
        return [one.astype("<f4").tobytes() for one in scores]

    def _score(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the sigmoid of one label, or the softmax of several."""
        if self._activated:
            return logits
        if self._labels == 1:
            score: NDArray[np.float32] = 1 / (1 + np.exp(-logits.clip(-80, 80)))
            return score
        powers: NDArray[np.float32] = np.exp(logits - logits.max())
        powers /= powers.sum()
        return powers


def _normalise_vector(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise a vector to length 1; a zero vector is returned unchanged."""
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector
