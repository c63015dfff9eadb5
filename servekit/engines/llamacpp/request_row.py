"""A running request in llama.cpp: a row of its batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from servekit.engines.api.job_state import Underway
from servekit.engines.llamacpp.media.mtmd import (
    NO_TOKEN,
    PLAIN,
    ChunkedPrompt,
    MediaChunk,
    Positions,
)


@dataclass(slots=True, eq=False)
class LlamaRow(Underway):
    """A running request; see `Underway`.

    Its tokens are kept when it loses its place in the cache.
    """

    suspected: bool = False  # there was a NaN in a pass with it: it gets no proposals any more
    _seen: set[int] = field(default_factory=set)
    _counts: dict[int, int] = field(default_factory=dict)
    _counted: int = 0  # completion tokens counted in both

    @property
    def media(self) -> ChunkedPrompt | None:
        """The images and recordings of the prompt."""
        return self.job.media if isinstance(self.job.media, ChunkedPrompt) else None

    @property
    def positions(self) -> Positions:
        return PLAIN if self.media is None else self.media.positions

    def find_chunk(self, index: int) -> MediaChunk | None:
        """Return the image or recording that token `index` belongs to; None: a text."""
        return None if self.media is None else self.media.find_chunk(index)

    def text_end(self, start: int) -> int:
        """Return where the text from token `start` on ends."""
        return self.length if self.media is None else self.media.next_start(start, self.length)

    def marked(self) -> list[int]:
        """Return all tokens, with the marks of images and recordings in their places."""
        tokens = self.tokens_between(0, self.length)
        return tokens if self.media is None else self.media.mark_tokens(tokens)

    @property
    def plain(self) -> bool:
        """True for plain greedy decoding: the next token is the argmax of the unchanged logits."""
        free = not (self.steered or self.wants_logprobs or self.constraint)
        return self.sampling.greedy and free

    def history(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float32]]:
        """Return the distinct tokens of context and completion, and the latter's counts."""
        if not self._seen:
            texts = self.marked()[: len(self.job.prompt_ids)]
            self._seen.update(token for token in texts if 0 <= token < NO_TOKEN)
        for token in self.completion[self._counted :]:
            self._seen.add(token)
            self._counts[token] = self._counts.get(token, 0) + 1
        self._counted = len(self.completion)
        return (
            np.fromiter(self._seen, np.intp),
            np.fromiter(self._counts, np.intp),
            np.fromiter(self._counts.values(), np.float32),
        )
