"""One request under way inside an engine: what every engine that samples itself has to know of it.

Nothing here needs torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from servekit.engines.base import EmbedJob, Job, StepOutput
from servekit.engines.choosing import Sampling
from servekit.engines.grammar import Constraint
from servekit.wire.messages import TokenLogprob


class Scores(NamedTuple):
    """Of one token: its log probability, and (token id, log probability) of the best."""

    chosen: float
    best: tuple[tuple[int, float], ...]


def _nameless(token: int) -> bytes:
    return b""


@dataclass(slots=True, eq=False)
class Underway:
    """A job, the tokens it has so far, and how it chooses the next one.

    `key` is unique in the engine's life, where a job's id may come again after a cancellation.
    `completion` starts with the tokens that another worker produced.
    """

    key: str
    job: Job
    sampling: Sampling
    eos: frozenset[int]  # empty when the request ignores the end of sequence and has no grammar
    max_tokens: int
    piece: Callable[[int], bytes] = _nameless  # the bytes of a token
    constraint: Constraint | None = None
    cancelled: bool = False
    completion: list[int] = field(default_factory=list)
    scores: Scores | None = None  # of the token that is about to be pushed

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
    def wants_logprobs(self) -> bool:
        return self.sampling.logprobs is not None

    @property
    def eos_forbidden(self) -> bool:
        """A grammar sees to it itself, because its text may have to end earlier."""
        early = self.position < self.sampling.min_tokens
        return early and bool(self.eos) and self.constraint is None

    @property
    def end_unwanted(self) -> bool:
        """A grammar is to go on while it can."""
        return self.job.params.ignore_eos or self.position < self.sampling.min_tokens

    @property
    def ended(self) -> StepOutput | None:
        """What there is to say if the tokens that another worker produced were already all."""
        if self.constraint is not None and self.constraint.ended:
            return StepOutput(self.job.id, [], "stop")
        return None if self.remaining > 0 else StepOutput(self.job.id, [], "length")

    @property
    def steered(self) -> bool:
        """Something changes its logits before the best of them is its token."""
        sampling = self.sampling
        return sampling.penalised or bool(sampling.logit_bias) or self.eos_forbidden

    def push(self, token: int) -> StepOutput:
        """Take the token of this step."""
        constraint = self.constraint
        if constraint is not None and constraint.failure:
            return self._failed(constraint)
        if token in self.eos:
            return StepOutput(self.job.id, [], "stop")
        self.completion.append(token)
        output = StepOutput(self.job.id, [token], None if self.remaining > 0 else "length")
        if self.scores is not None:
            output.logprobs = [self._logprob(token, self.scores)]
            self.scores = None
        if constraint is not None:
            constraint.take(token)
            if constraint.failure:
                return self._failed(constraint)
            output.finish = "stop" if constraint.ended else output.finish
        return output

    def _failed(self, constraint: Constraint) -> StepOutput:
        return StepOutput(self.job.id, [], error=constraint.failure, param=constraint.grammar.param)

    def _logprob(self, token: int, scores: Scores) -> TokenLogprob:
        best = tuple((self.piece(other), value) for other, value in scores.best)
        return TokenLogprob(self.piece(token), scores.chosen, best)


@dataclass(slots=True, eq=False)
class EmbedRow:
    """A job with texts to embed, and what is left to do of it."""

    key: str
    job: EmbedJob
    cancelled: bool = False
    vectors: list[bytes] = field(default_factory=list)
    left: deque[int] = field(default_factory=deque)  # texts without a vector, the longest first
    ended: StepOutput | None = None  # nothing is ever done before it is begun

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.job.inputs)
        lengths = [len(ids) for ids in self.job.inputs]
        self.left = deque(sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True))
