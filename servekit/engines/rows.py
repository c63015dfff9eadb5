"""One request under way inside an engine: a row of the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from servekit.engines.adapters.adapter import Adapter
from servekit.engines.base import Job, StepOutput
from servekit.engines.grammar import Constraint
from servekit.engines.logprobs import Scores
from servekit.engines.sampling import Sampling
from servekit.wire.messages import TokenLogprob


def _nameless(token: int) -> bytes:
    return b""


@dataclass(slots=True, eq=False)
class Row:
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
    adapter: Adapter | None = None  # None: the base model
    cached_tokens: int | None = None  # of the prompt, once it was looked for in the cache
    noted: list[Tensor] | None = None  # where to keep its logits, float32 [vocabulary], if anywhere
    private: threading.Event | None = None  # the engine's own: emitted to no one, set at its end
    cancelled: bool = False
    completion: list[int] = field(default_factory=list)
    scores: Scores | None = None  # of the token that is about to be pushed
    _bias: tuple[Tensor, Tensor] | None = None
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
        """Tokens of prompt and completion so far, an adapter's virtual ones included."""
        return self.virtual_tokens + len(self.job.prompt_ids) + len(self.completion)

    @property
    def context(self) -> list[int]:
        """What the model has to have read before the next token.

        Virtual tokens are zeros here: what they embed to is put in their place (`Mixing`).
        """
        return [0] * self.virtual_tokens + self.job.prompt_ids + self.completion

    @property
    def virtual_tokens(self) -> int:
        return 0 if self.adapter is None else self.adapter.virtual_tokens

    def note_cached(self, tokens: int) -> None:
        """So many tokens of its context were in the cache; only the first time tells of the prompt.

        Later ones are of a row that had to make room, and finds what it had computed itself.
        """
        if self.cached_tokens is None:
            own = max(0, tokens - self.virtual_tokens)
            self.cached_tokens = min(own, len(self.job.prompt_ids))

    @property
    def group(self) -> int:
        """Rows of one group may share a step."""
        return 0 if self.adapter is None else self.adapter.group

    @property
    def adapter_uid(self) -> int:
        """0 is the base model."""
        return 0 if self.adapter is None else self.adapter.uid

    @property
    def plain(self) -> bool:
        """Greedy and nothing else: the argmax of the logits as they are is its token."""
        sampling = self.sampling
        steered = sampling.penalised or bool(sampling.logit_bias) or self.eos_forbidden
        watched = self.wants_logprobs or self.noted is not None
        return sampling.greedy and not (steered or watched or self.constraint)

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
    def ends_itself(self) -> bool:
        """Ended by its grammar, of which the library knows nothing."""
        return self.constraint is not None and (
            self.constraint.ended or bool(self.constraint.failure)
        )

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

    def bias(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Token ids and what is added to their logits, both [entries]."""
        if self._bias is None:
            ids, values = zip(*self.sampling.logit_bias, strict=True)
            self._bias = (
                torch.tensor(ids, device=device),
                torch.tensor(values, dtype=torch.float32, device=device),
            )
        return self._bias

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
