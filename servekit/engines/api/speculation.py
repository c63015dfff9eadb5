"""Speculative decoding: proposals of tokens, which one forward pass verifies all at once.

The pass reads a row's last token and its k proposed ones, and so gives the logits after each of
them. From these a token is chosen as in any other step, with the noise of its own position (see
`text.sampling_params`), and the next one counts only while the chosen token is the proposed one.
So each token is the very one that the row would have had without proposals: greedy text and the
text of a seed are the same. Over all seeds a proposal x is accepted with probability p(x), and
otherwise replaced by a draw from p without x: the rejection sampling of speculative decoding, for a
proposal that is certain (Leviathan et al., 2023, https://arxiv.org/abs/2211.17192).

`NgramProposer` looks the row's last tokens up in its own prompt and completion (prompt lookup,
https://github.com/apoorvumang/prompt-lookup-decoding).

Verification pays while the pass is dominated by reading the weights, which happens once for all
tokens. `count_worthwhile` decides by the number of running rows and by what was accepted before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import structlog

from servekit.engines.api.base import Load, StepOutput
from servekit.engines.api.job_state import Underway
from servekit.errors import describe_error
from servekit.protocol.messages import WorkerSpec

log: Any = structlog.get_logger(__name__)

#: A row's chance that a proposed token is accepted, before anything is known of it.
_PRIOR = 0.6
#: Weight of one accepted or rejected token in that chance.
_LEARNT = 0.15
#: Share by which the chance of a row returns to the prior with each token without proposals, so
#: that it tries again.
_FORGOTTEN = 1 / 128
#: Steps without proposals by which those with proposals are judged.
_KNOWN = 16
#: Steps with proposals after which those without are measured again.
_VALID = 1024
#: The longest pause in proposals that bring less, in times of the first.
_LONGEST_PAUSE = 64


class Speculation(msgspec.Struct, frozen=True):
    """The option `speculative`."""

    method: Literal["ngram", "draft"]
    tokens: int = 4  # maximum number of proposed tokens of a row in a step
    ngram_max: int = 3  # maximum and minimum length of what is looked up
    ngram_min: int = 2
    model: str | None = None  # the draft model


class Counts(NamedTuple):
    """Tokens since the start, as vLLM counts them."""

    drafts: int = 0  # proposals
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def add_to(self, load: Load) -> Load:
        """Return an engine's load with these tokens."""
        tokens = {"draft_tokens": self.draft_tokens, "accepted_tokens": self.accepted_tokens}
        return replace(load, **tokens)


R = TypeVar("R", bound=Underway)
#: By a row's key, the row and the most tokens to propose for it.
Wanted = dict[str, tuple[R, int]]


def get_speculation(spec: WorkerSpec) -> Speculation | None:
    """Return the option of a model, if it has one."""
    stated = spec.options.get("speculative")
    return msgspec.convert(stated, Speculation) if stated else None


class Proposer(ABC, Generic[R]):
    """A source of proposals.

    `cost` is the time of proposing a token per time of a step, and `pause` the number of steps
    without proposals after the first time that they have brought less.
    """

    cost = 0.0
    pause = 64

    @abstractmethod
    def propose(self, wanted: Wanted[R]) -> dict[str, list[int]]:
        """Return proposed tokens by row's key: at most the number wanted for the row, or none."""

    def is_promising(self, wanted: Wanted[R]) -> bool:
        """Return whether it may propose, given all tokens of the rows but the latest."""
        return True

    @abstractmethod
    def forget(self, key: str) -> None:
        """Forget a row that has ended."""

    def close(self) -> None:
        """Free what it has allocated."""


# ---------------------------------------------------------------- n-grams


@dataclass(slots=True)
class _History:
    """The tokens of a row in an array with room for all that may follow."""

    tokens: Any  # int32
    known: int = 0

    @classmethod
    def of(cls, row: Underway) -> _History:
        prompt = row.job.prompt_ids
        made = cls(np.empty(len(prompt) + row.max_tokens, np.int32), len(prompt))
        made.tokens[: len(prompt)] = prompt
        return made

    def follow(self, row: Underway) -> Any:
        """Add the row's new tokens; return all."""
        total = len(row.job.prompt_ids) + len(row.completion)
        if new := total - self.known:
            self.tokens[self.known : total] = row.completion[-new:]
            self.known = total
        return self.tokens[:total]


class NgramProposer(Proposer[Underway]):
    """A proposer of the tokens that followed the row's last ones where these occurred before."""

    def __init__(self, speculation: Speculation) -> None:
        self._longest, self._shortest = speculation.ngram_max, speculation.ngram_min
        self._histories: dict[str, _History] = {}

    def propose(self, wanted: Wanted[Underway]) -> dict[str, list[int]]:
        found = {}
        for key, (row, count) in wanted.items():
            if key not in self._histories:
                self._histories[key] = _History.of(row)
            tokens = self._histories[key].follow(row)
            if proposed := look_up(tokens, self._longest, self._shortest, count):
                found[key] = proposed
        return found

    def is_promising(self, wanted: Wanted[Underway]) -> bool:
        return bool(self.propose(wanted))

    def forget(self, key: str) -> None:
        self._histories.pop(key, None)


def look_up(tokens: Any, longest: int, shortest: int, count: int) -> list[int]:
    """Return what followed the last tokens at their latest earlier occurrence; [] without one.

    `tokens` is an int32 array. The match is as long as possible, from `shortest` to `longest`
    tokens. Where less than `count` tokens follow it, these are repeated: the text may be periodic.
    """
    size = len(tokens)
    if size < 2:
        return []
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    best = None
    for length in range(1, longest + 1):
        if length > 1:
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[size - length]]
        if not len(ends):
            break
        if length >= shortest:
            best = int(ends[-1])
    if best is None:
        return []
    period = size - 1 - best
    proposed: list[int] = tokens[best + 1 : best + 1 + count].tolist()
    while len(proposed) < count:
        proposed.append(proposed[-period])
    return proposed


# ---------------------------------------------------------------- what pays


def count_worthwhile(chance: float, rows: int, worth: float, cost: float, most: int) -> int:
    """Return how many tokens to propose for a row, of `most`.

    A token of one of n rows brings 1/n of a step's tokens if it is accepted; to verify it takes
    1/(n + W) of a step's time, with W for `worth`, and to propose one for each row, and to
    wait, takes `cost`. So the j-th token is proposed while `chance` to the power j is more than
    n/(n + W) + `cost`.
    """
    threshold = rows / (rows + worth) + cost
    if chance <= threshold:
        return 0
    return most if chance >= 1.0 else min(most, int(math.log(threshold) / math.log(chance)))


@dataclass(slots=True)
class StepRates:
    """What steps with proposals lose against those without, for some number of rows.

    The first `_KNOWN` steps have no proposals. Proposals that have lost the time of twice as many
    rest for `first_pause` steps, and for twice as many each time that this happens again. Steps
    without proposals are measured again every `_VALID` steps: they may have met a bad moment.
    """

    first_pause: int
    #: Of the last steps without proposals, their tokens and their time in s; older ones count less.
    made: float = 0.0
    took_s: float = 0.0
    tried: int = 0  # steps with proposals
    lost: float = 0.0  # tokens that steps without proposals would have made meanwhile
    rest: int = _KNOWN  # steps that have no proposals yet
    pauses: int = 1  # length of the next pause, in times of the first

    def note_step(self, *, proposed: bool, tokens: int, took_s: float) -> None:
        """Note what a step brought."""
        if not proposed:
            self.made = self.made * (1.0 - 1.0 / _KNOWN) + tokens
            self.took_s = self.took_s * (1.0 - 1.0 / _KNOWN) + took_s
            self.rest = max(0, self.rest - 1)
        elif self.took_s:
            self.tried += 1
            self.lost += took_s * self.made / self.took_s - tokens
            if self.lost > 2 * self.made:  # `made` are the tokens of some `_KNOWN` steps
                self.rest, self.lost = self.first_pause * self.pauses, 0.0
                self.pauses = min(2 * self.pauses, _LONGEST_PAUSE)
            elif self.lost < -self.made:
                self.pauses, self.lost = 1, -self.made
            if self.tried % _VALID == 0 and not self.rest:
                self.rest, self.made, self.took_s = _KNOWN, 0.0, 0.0


@dataclass(slots=True)
class Speculator:
    """The proposals of all rows: whether they pay, and what became of them.

    `worth` is the number of tokens whose arithmetic takes as long as reading the weights once, and
    `wait` what a step with proposals takes longer for other reasons, as a share. `room` is the
    maximum number of tokens in a step. After an error of the proposer there are no proposals any
    more.
    """

    proposer: Proposer[Any]
    speculation: Speculation
    worth: float
    wait: float = 0.0
    counts: Counts = field(default_factory=Counts)
    #: Whether the last step was to have proposals.
    attempted: bool = False
    failure: str = ""  # the error of the proposer
    _rates: dict[int, StepRates] = field(default_factory=dict)  # by the rows' power of two
    _chances: dict[str, float] = field(default_factory=dict)  # by row's key

    @property
    def how(self) -> str:
        """Return a short description for people."""
        return f"{self.speculation.tokens} proposed tokens ({self.speculation.method})"

    def make_proposals(self, rows: Sequence[Underway], room: int) -> dict[str, list[int]]:
        """Return the proposals of a step that runs these rows, by key; {} if none pays."""
        wanted = self._find_wanted(rows, room)
        if not wanted:
            return {}
        try:
            proposals = self.proposer.propose(wanted)
        except Exception as error:  # no request is lost for what would only have been faster
            self.failure = describe_error(error)
            log.exception("speculation_failed", reason=self.failure)
            return {}
        self.attempted = True
        return proposals

    def is_promising(self, rows: Sequence[Underway], room: int) -> bool:
        """Return whether `make_proposals` is likely to find some once a running step has ended."""
        wanted = self._find_wanted(rows, room)
        return bool(wanted) and self.proposer.is_promising(wanted)

    def note_step(self, rows: int, tokens: int, took_s: float) -> None:
        """Note what a step of so many rows brought."""
        self._rates_of(rows).note_step(proposed=self.attempted, tokens=tokens, took_s=took_s)
        self.attempted = False

    def _rates_of(self, rows: int) -> StepRates:
        return self._rates.setdefault(rows.bit_length(), StepRates(self.proposer.pause))

    def _find_wanted(self, rows: Sequence[Underway], room: int) -> Wanted[Underway]:
        if self.failure or self._rates_of(len(rows)).rest:
            return {}
        share = room // len(rows) - 1 if rows else 0
        cost = self.proposer.cost + self.wait
        wanted: Wanted[Underway] = {}
        gain = 0.0
        for row in rows:
            chance = self._chances.setdefault(row.key, _PRIOR)
            most = min(self.speculation.tokens, row.remaining - 1, share)
            count = count_worthwhile(chance, len(rows), self.worth, cost, most)
            if count > 0:
                wanted[row.key] = (row, count)
                gain += sum(chance**at for at in range(1, count + 1))
        return wanted if gain > self._time_longer(wanted, len(rows)) * len(rows) else {}

    def _time_longer(self, wanted: Wanted[Underway], rows: int) -> float:
        """Return how much longer a step takes with proposals, as a share of one without.

        Drafting and waiting take as long for a few rows as for all.
        """
        counts = [count for _, count in wanted.values()]
        verifying = sum(counts) / (rows + self.worth)
        return self.wait + self.proposer.cost * max(counts, default=0) + verifying

    def note_proposal(self, key: str, proposed: int, accepted: int) -> None:
        """Learn what became of a row's proposal in a step; 0 proposed if it had none."""
        if proposed:
            drafts, draft_tokens, accepted_tokens = self.counts
            self.counts = Counts(drafts + 1, draft_tokens + proposed, accepted_tokens + accepted)
        chance = self._chances.get(key)
        if chance is None:  # it has ended
            return
        if not proposed:
            self._chances[key] = chance + (_PRIOR - chance) * _FORGOTTEN
            return
        for _ in range(accepted):
            chance += (1.0 - chance) * _LEARNT
        self._chances[key] = chance if accepted == proposed else chance * (1.0 - _LEARNT)

    def forget_row(self, key: str) -> None:
        """Forget a row that has ended or left."""
        self._chances.pop(key, None)
        self.proposer.forget(key)


def join_outputs(earlier: StepOutput, later: StepOutput) -> None:
    """Add to a row's output the one of the next token of the same step."""
    earlier.token_ids += later.token_ids
    earlier.finish, earlier.stop_token = later.finish, later.stop_token
    if later.logprobs:
        earlier.logprobs = [*(earlier.logprobs or ()), *later.logprobs]
