"""Embeddings by llama.cpp: one unit vector per text, pooled as the model's file says."""

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
        context = self._context
        context.clear_batch()
        for sequence, ids in enumerate(texts):
            context.put(sequence, 0, ids, output=True)
        context.decode_batch()
        vectors = [_normalise_vector(context.embedding(sequence)) for sequence in range(len(texts))]
        context.clear_cache()
        if len(texts) > 1 and any(np.isnan(vector).any() for vector in vectors):
            # it may be another text's NaN; see `generation`
            return [vector for text in texts for vector in self.embed([text])]
        return [vector.astype("<f4").tobytes() for vector in vectors]

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


def _normalise_vector(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise a vector to length 1; a zero vector is returned unchanged."""
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector
