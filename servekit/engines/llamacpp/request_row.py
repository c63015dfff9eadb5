"""A running request in llama.cpp: a row of its batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from servekit.engines.api.job_state import Underway


@dataclass(slots=True, eq=False)
class LlamaRow(Underway):
    """A running request; see `Underway`.

    Its tokens are kept when it loses its place in the cache.
    """

    _seen: set[int] = field(default_factory=set)
    _counts: dict[int, int] = field(default_factory=dict)
    _counted: int = 0  # completion tokens counted in both

    def context(self, start: int, end: int) -> list[int]:
        """Return the tokens `start` to `end` of prompt and completion."""
        prompt = self.job.prompt_ids
        if start >= len(prompt):
            return self.completion[start - len(prompt) : end - len(prompt)]
        return prompt[start:end] + self.completion[: max(0, end - len(prompt))]

    @property
    def plain(self) -> bool:
        """True for plain greedy decoding: the next token is the argmax of the unchanged logits."""
        free = not (self.steered or self.wants_logprobs or self.constraint)
        return self.sampling.greedy and free

    def history(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
        """Return the distinct tokens of context and completion, and the latter's counts."""
        if not self._seen:
            self._seen.update(self.job.prompt_ids)
        for token in self.completion[self._counted :]:
            self._seen.add(token)
            self._counts[token] = self._counts.get(token, 0) + 1
        self._counted = len(self.completion)
        return (
            np.fromiter(self._seen, np.intp),
            np.fromiter(self._counts, np.intp),
            np.fromiter(self._counts.values(), np.float32),
        )
