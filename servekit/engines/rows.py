"""One request under way inside an engine: a row of the batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from servekit.engines.base import Job, StepOutput
from servekit.engines.sampling import Sampling


@dataclass(slots=True, eq=False)
class Row:
    """A job, the tokens it has so far, and how it chooses the next one.

    `key` is unique in the engine's life, where a job's id may come again after a cancellation.
    `completion` starts with the tokens that another worker produced.
    """

    key: str
    job: Job
    sampling: Sampling
    eos: frozenset[int]  # empty when the request ignores the end of sequence
    max_tokens: int
    cancelled: bool = False
    completion: list[int] = field(default_factory=list)
    _counted: int = 0
    _counts: Tensor | None = None
    _seen: Tensor | None = None

    def __post_init__(self) -> None:
        self.completion = list(self.job.emitted)

    @property
    def position(self) -> int:
        """Completion tokens before the next one."""
        return len(self.completion)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.completion)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.job.prompt_ids) + len(self.completion)

    @property
    def context(self) -> list[int]:
        """What the model has to have read before the next token."""
        return self.job.prompt_ids + self.completion

    @property
    def eos_forbidden(self) -> bool:
        return bool(self.eos) and self.position < self.sampling.min_tokens

    def push(self, token: int) -> StepOutput:
        """Take the token of this step."""
        if token in self.eos:
            return StepOutput(self.job.id, [], "stop")
        self.completion.append(token)
        return StepOutput(self.job.id, [token], None if self.remaining > 0 else "length")

    def history(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Times each token is in the completion, and whether it is anywhere in the context.

        Two tensors [vocabulary], float32 and bool, kept and brought up to date here.
        """
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(vocab_size, device=device)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(self.job.prompt_ids, device=device)] = True
        new = self.completion[self._counted :]
        if new:
            ids = torch.tensor(new, device=device)
            self._counts.index_add_(0, ids, torch.ones(len(new), device=device))
            self._seen[ids] = True
            self._counted = len(self.completion)
        return self._counts, self._seen
