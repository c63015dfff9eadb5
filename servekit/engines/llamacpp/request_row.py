"""One request under way in llama.cpp: a row of its batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from servekit.engines.api.job_state import Underway


@dataclass(slots=True, eq=False)
class LlamaRow(Underway):
    """See `Underway`. Its tokens are what survives when its place in the cache is taken."""

    cached_tokens: int | None = None  # of the prompt, once it was looked for in the cache
    _seen: set[int] = field(default_factory=set)
    _counts: dict[int, int] = field(default_factory=dict)
    _counted: int = 0  # tokens of the completion that are in both

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.job.prompt_ids) + len(self.completion)

    def note_cached(self, tokens: int) -> None:
        """So many of its tokens were in the cache; only the first time tells of the prompt.

        Later ones are of a row that had to make room, and finds what it had computed itself.
        """
        if self.cached_tokens is None:
            self.cached_tokens = min(tokens, len(self.job.prompt_ids))

    def context(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end` of what the model has to have read before the next one."""
        prompt = self.job.prompt_ids
        if start >= len(prompt):
            return self.completion[start - len(prompt) : end - len(prompt)]
        return prompt[start:end] + self.completion[: max(0, end - len(prompt))]

    @property
    def plain(self) -> bool:
        """Greedy and nothing else: the argmax of the logits as they are is its token."""
        free = not (self.steered or self.wants_logprobs or self.constraint)
        return self.sampling.greedy and free

    def history(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
        """Tokens anywhere in the context; those of the completion, and how often each is there."""
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
