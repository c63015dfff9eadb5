"""Questions with baseline answers, and the comparison of later answers with them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from servekit.chaos.client import KEY_VARIABLE, ChatAnswer, Client, Question
from servekit.errors import ServekitError

_WORDS = (
    *("river", "stone", "lantern", "orchard", "quiet", "engine", "harbour", "winter", "copper"),
    *("meadow", "violin", "compass", "thunder", "paper", "garden", "mirror", "saddle", "cinnamon"),
    *("glacier", "window", "anchor", "feather", "marble", "ribbon"),
)
#: Characters compared to distinguish a repeated chunk from other wrong text.
_SAMPLE = 12


@dataclass(frozen=True, slots=True)
class BaselineAnswer:
    """A question and its baseline answer. `sure`: two answers were equal."""

    question: Question
    answer: ChatAnswer
    sure: bool


def make_prompt(number: int, words: int = 60) -> str:
    """Return a distinct random text for each number."""
    draw = random.Random(number)
    return f"Tell a story ({number}) with: " + " ".join(draw.choice(_WORDS) for _ in range(words))


async def learn_answers(
    client: Client, questions: Sequence[Question], at_once: int = 8
) -> list[BaselineAnswer]:
    """Ask every question twice without any fault.

    Raises ServekitError for a failed request: chaos needs a healthy instance.
    """
    room = asyncio.Semaphore(at_once)

    async def ask_question(question: Question, stream: bool) -> ChatAnswer:
        async with room:
            answer = await client.await_answer(question, stream=stream)
        if answer.status == 401:
            raise ServekitError(f"it wants an API key: put one of its keys into {KEY_VARIABLE}")
        if answer.failure:
            raise ServekitError(f"it does not answer even without a fault: {answer.failure}")
        return answer

    first = await asyncio.gather(*(ask_question(question, True) for question in questions))
    again = await asyncio.gather(*(ask_question(question, False) for question in questions))
    return [
        BaselineAnswer(question, one, one.text == other.text and one.usages == other.usages)
        for question, one, other in zip(questions, first, again, strict=True)
    ]


def classify_difference(expected: str, got: str) -> str:
    """Classify the difference between texts: "", "missing", "repeated" or "wrong"."""
    if got == expected:
        return ""
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    rest = got[at : at + _SAMPLE]
    if not rest or rest in expected[at + 1 :]:
        return "missing"
    return "repeated" if rest in expected[: at + _SAMPLE - 1] else "wrong"


@dataclass(slots=True)
class Tally:
    """The outcomes of the requests of one experiment."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    wrong: int = 0  # answers that differ from the baseline
    unsure: int = 0  # answers that have no sure baseline
    kinds: Counter[str] = field(default_factory=Counter)  # "missing", "repeated", "usage", …
    failures: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)  # times of complete answers

    def add(self, known: BaselineAnswer, answer: ChatAnswer) -> None:
        self.sent += 1
        if answer.failure:
            self.failed += 1
            self.failures[answer.failure] += 1
            return
        self.answered += 1
        self.took_s.append(answer.took_s)
        self.ended_s.append(answer.ended_s)
        if known.sure:
            self._compare(known.answer, answer)
        else:
            self.unsure += 1

    def _compare(self, expected: ChatAnswer, got: ChatAnswer) -> None:
        if kind := classify_difference(expected.text, got.text):
            self.wrong += 1
            self.kinds[kind] += 1
        elif got.finishes != expected.finishes:
            self.wrong += 1
            self.kinds["finish"] += 1
        if got.usages != expected.usages:
            self.kinds["usage"] += 1

    @property
    def clean(self) -> bool:
        return not self.failed and not self.kinds

    def complaints(self) -> str:
        """Return the failures, the most frequent first; "" if there are none."""
        parts = [f"{count} × {what}" for what, count in self.failures.most_common(3)]
        parts += [f"{count} × {kind}" for kind, count in self.kinds.most_common()]
        return "; ".join(parts)
