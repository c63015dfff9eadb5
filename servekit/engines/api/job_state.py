"""The state of one running request, shared by all engines that sample themselves.

Nothing here needs torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from servekit.engines.api.base import EmbedJob, Job, StepOutput
from servekit.engines.text.sampling_params import LEAST, Sampling
from servekit.protocol.messages import PromptToken, TokenLogprob

if TYPE_CHECKING:  # it needs llguidance, which engines without grammars do without
    from servekit.engines.text.structured_output import Constraint

#: Stands for a token if the model computed NaN.
NOT_A_NUMBER = -1
_BROKEN = (
    "The model computed values that are not numbers (NaN) for this request. Its weights, or those "
    "of its adapter, overflow the model's dtype: serve it in bfloat16 or float32."
)


def make_embedding_output(job_id: int, vectors: list[bytes]) -> StepOutput:
    """Return the only output of an EmbedJob: an error if a vector holds NaN, else the vectors.

    `vectors` are float32 little-endian. JSON has no NaN: clients would read null.
    """
    if any(math.isnan(sum(array("f", vector))) for vector in vectors):
        return StepOutput(job_id, [], error=_BROKEN)
    return StepOutput(job_id, [], "stop", vectors=vectors)


class Scores(NamedTuple):
    """Log probability of one token, and (token id, log probability) of the best candidates."""

    chosen: float
    best: tuple[tuple[int, float], ...]


def _no_piece(token: int) -> bytes:
    return b""


def ends_of(job: Job, eos: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end a job: its own, and the model's `eos` unless it ignores them.

    With a grammar the `eos` are never ignored, because the text may have to end there.
    """
    ignored = job.params.ignore_eos and job.constraint is None
    own = job.params.stop_token_ids
    if not own:
        return frozenset() if ignored else eos
    return frozenset(own) | (frozenset() if ignored else eos)


def find_common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    end = min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    return next(at for at in range(end) if one[at] != other[at])


@dataclass(slots=True, eq=False)
class Underway:
    """A running job: its tokens so far and how the next one is sampled.

    `key` is unique in the engine's life; a job's id may be reused after a cancellation.
    `completion` starts with the tokens that another worker generated.
    """

    key: str
    job: Job
    sampling: Sampling
    eos: frozenset[int]  # see `ends_of`
    max_tokens: int
    piece: Callable[[int], bytes] = _no_piece  # the bytes of a token
    constraint: Constraint | None = None
    cancelled: bool = False
    completion: list[int] = field(default_factory=list)
    scores: Scores | None = None  # of the token to be pushed next
    broken: bool = False  # the model computed NaN
    unscored: bool = False  # log probabilities of the prompt were requested and are not complete
    prompt_scores: list[PromptToken] = field(default_factory=list)  # those of the prompt so far
    cached_tokens: int | None = None  # of the prompt, once looked up in the cache

    def __post_init__(self) -> None:
        self.completion = list(self.job.emitted)
        if self.job.params.prompt_logprobs is not None:
            self.score_prompt()

    def score_prompt(self) -> None:
        """Start collecting log probabilities of the prompt; its first token has none."""
        first = self.job.prompt_ids[0]
        self.prompt_scores = [PromptToken(first, self.piece(first))]
        self.unscored = len(self.job.prompt_ids) > 1

    def note_prompt(
        self, token: int, logprob: float, rank: int, best: Sequence[tuple[int, float]]
    ) -> None:
        """Add the log probability of the next prompt token."""
        self.broken |= math.isnan(logprob)
        named = tuple((other, self.piece(other), max(value, LEAST)) for other, value in best)
        known = PromptToken(token, self.piece(token), max(logprob, LEAST), rank, named)
        self.prompt_scores.append(known)
        self.unscored = len(self.prompt_scores) < len(self.job.prompt_ids)

    def tell_prompt(self, output: StepOutput) -> None:
        """Move the prompt's log probabilities, if any, into the first output."""
        if self.prompt_scores:
            output.prompt, self.prompt_scores = self.prompt_scores, []

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens that its adapter puts before the prompt."""
        return 0

    @property
    def length(self) -> int:
        """Number of tokens of prompt and completion so far, including virtual tokens."""
        return self.virtual_tokens + len(self.job.prompt_ids) + len(self.completion)

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Return the tokens `start` to `stop` of prompt and completion, without virtual ones."""
        prompt = self.job.prompt_ids
        before = len(prompt)
        if start >= before:
            return self.completion[start - before : stop - before]
        return prompt[start:stop] + self.completion[: max(0, stop - before)]

    def note_cached(self, tokens: int) -> None:
        """Record the number of tokens found in the cache, on the first lookup only.

        A later lookup concerns a row that was evicted and finds its own earlier results.
        """
        if self.cached_tokens is None:
            own = max(0, tokens - self.virtual_tokens)
            self.cached_tokens = min(own, len(self.job.prompt_ids))

    @property
    def position(self) -> int:
        """Number of completion tokens so far."""
        return len(self.completion)

    @property
    def remaining(self) -> int:
        return self.max_tokens - len(self.completion)

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.logprobs is not None

    @property
    def eos_forbidden(self) -> bool:
        """True while `min_tokens` forbids the end; a grammar's text may end earlier."""
        early = self.position < self.sampling.min_tokens
        return early and bool(self.eos) and self.constraint is None

    def forbidden(self) -> list[int]:
        """Return the last tokens of banned sequences whose other tokens end the completion."""
        done = self.completion
        return [
            word[-1]
            for word in self.job.banned
            if len(word) == 1 or done[-(len(word) - 1) :] == list(word[:-1])
        ]

    @property
    def end_unwanted(self) -> bool:
        """True if a grammar should continue for as long as it can."""
        return self.job.params.ignore_eos or self.position < self.sampling.min_tokens

    @property
    def ended(self) -> StepOutput | None:
        """The final output, if the tokens that another worker generated were already complete."""
        if self.constraint is not None and self.constraint.is_complete:
            return StepOutput(self.job.id, [], "stop")
        return None if self.remaining > 0 else StepOutput(self.job.id, [], "length")

    @property
    def steered(self) -> bool:
        """True if the logits are changed before the best of them is chosen."""
        sampling = self.sampling
        changed = sampling.penalised or sampling.logit_bias or self.job.banned
        return bool(changed) or self.eos_forbidden

    def push(self, token: int) -> StepOutput:
        """Add the token of this step and return its output."""
        if token == NOT_A_NUMBER or self.broken:
            self.broken = True
            return StepOutput(self.job.id, [], error=_BROKEN)
        constraint = self.constraint
        if constraint is not None and constraint.failure:
            return self._grammar_failure(constraint)
        if token in self.eos:
            asked = token in self.job.params.stop_token_ids
            return StepOutput(self.job.id, [], "stop", stop_token=token if asked else -1)
        self.completion.append(token)
        output = StepOutput(self.job.id, [token], None if self.remaining > 0 else "length")
        if self.scores is not None:
            output.logprobs = [self._token_logprob(token, self.scores)]
            self.scores = None
        if constraint is not None:
            constraint.accept_token(token)
            if constraint.failure:
                return self._grammar_failure(constraint)
            output.finish = "stop" if constraint.is_complete else output.finish
        return output

    def _grammar_failure(self, constraint: Constraint) -> StepOutput:
        return StepOutput(self.job.id, [], error=constraint.failure, param=constraint.grammar.param)

    def _token_logprob(self, token: int, scores: Scores) -> TokenLogprob:
        best = tuple((self.piece(other), value) for other, value in scores.best)
        return TokenLogprob(self.piece(token), scores.chosen, best)


@dataclass(slots=True, eq=False)
class EmbedRow:
    """A running job with texts to embed, and its remaining texts."""

    key: str
    job: EmbedJob
    cancelled: bool = False
    vectors: list[bytes] = field(default_factory=list)
    left: deque[int] = field(default_factory=deque)  # texts without a vector, longest first
    ended: StepOutput | None = None  # always None: an embedding job never starts completed

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.job.inputs)
        lengths = [len(ids) for ids in self.job.inputs]
        self.left = deque(sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True))


R = TypeVar("R")  # a row, as the runner has it


class TurnRunner(ABC, Generic[R]):
    """A runner whose rows take turns, so that a long one does not delay a short one.

    None waits: each row has its turn.
    """

    def __init__(self) -> None:
        self._rows: deque[R] = deque()

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return 0

    @property
    def kv_used(self) -> float:
        return 0.0

    def add(self, row: R) -> None:
        self._rows.append(row)

    def cancel(self, row: R) -> None:
        self._rows = deque(other for other in self._rows if other is not row)


class EmbedRunner(TurnRunner[EmbedRow]):
    """A runner of embedding jobs, batch by batch; called only from the engine's thread."""

    def step(self) -> list[tuple[EmbedRow, StepOutput]]:
        """Run one batch; return the rows that it has completed."""
        batch = self._take_batch()
        vectors = self.run_batch(batch)
        for (row, index), vector in zip(batch, vectors, strict=True):
            row.vectors[index] = vector
        first = self._rows[0]
        done = [row for row in self._rows if not row.left]
        self._rows = deque(row for row in self._rows if row.left)
        if self._rows and self._rows[0] is first:
            self._rows.rotate(-1)
        return [(row, make_embedding_output(row.job.id, row.vectors)) for row in done]

    def close(self) -> None:
        self._rows.clear()

    def run_batch(self, batch: list[tuple[EmbedRow, int]]) -> list[bytes]:
        """Run the texts of a batch, each given by its row and place; return their vectors."""
        return self.embed([row.job.inputs[index] for row, index in batch])

    @abstractmethod
    def embed(self, texts: list[list[int]]) -> list[bytes]:
        """Embed texts in one pass; return one little-endian float32 vector per text."""

    @abstractmethod
    def _take_batch(self) -> list[tuple[EmbedRow, int]]:
        """Take the texts of one batch from the rows: at least one, and more while they fit."""
