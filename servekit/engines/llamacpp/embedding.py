"""Embeddings by llama.cpp: one unit vector per text, pooled as the model's file says.

A step is one pass over as many texts as fit. Requests take turns, so that a request with thousands
of texts does not hold up one with a single text.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from servekit.engines.api.base import StepOutput
from servekit.engines.api.job_state import EmbedRow, make_embedding_output
from servekit.engines.llamacpp.model import Context


class LlamaEmbedder:
    """A runner of embedding jobs, batch by batch; all calls come from the engine's thread."""

    def __init__(self, context: Context, step_tokens: int) -> None:
        """Store the limit `step_tokens` of one pass, which a single text may exceed."""
        self._context = context
        self._step_tokens = step_tokens
        self._rows: deque[EmbedRow] = deque()

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

    def close(self) -> None:
        self._rows.clear()
        self._context.close()

    def step(self) -> list[tuple[EmbedRow, StepOutput]]:
        """Run one batch; return the completed rows."""
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

    def embed(self, texts: list[list[int]]) -> list[bytes]:
        """Embed texts in one pass; return a float32 little-endian vector for each."""
        context = self._context
        context.begin()
        for sequence, ids in enumerate(texts):
            context.put(sequence, 0, ids, output=True)
        context.run()
        vectors = [_unit(context.embedding(sequence)) for sequence in range(len(texts))]
        context.forget()
        return [vector.astype("<f4").tobytes() for vector in vectors]

    def _take(self) -> list[tuple[EmbedRow, int]]:
        """Return the texts of one batch: at least one, and more while they fit."""
        batch: list[tuple[EmbedRow, int]] = []
        tokens = 0
        for row in self._rows:
            while row.left and len(batch) < self._context.sequences:
                tokens += len(row.job.inputs[row.left[0]])
                if batch and tokens > self._step_tokens:
                    return batch
                batch.append((row, row.left.popleft()))
        return batch


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise a vector to length 1; a zero vector is returned unchanged."""
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if length else vector
