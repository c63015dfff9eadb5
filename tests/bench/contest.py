"""Two or more servers under the same load, by turns: A B A B, so that a disturbance hits all."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from tests.bench.cpu import await_calm
from tests.bench.load import Order, Result, run


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    rounds: int = 5
    seconds: float = 2.0
    calm_within_s: float = 0.0  # wait this long for a calm machine before each measurement
    quick: bool = False  # a smoke test: the figures mean nothing
    wide: bool = False  # more numbers of streams than the promise is about

    @classmethod
    def smoke(cls) -> Plan:
        return cls(rounds=1, seconds=0.3, quick=True)

    def fewer(self, rounds: int) -> Plan:
        return replace(self, rounds=min(self.rounds, rounds))


@dataclass(slots=True)
class Outcome:
    """All rounds of one contestant."""

    results: list[Result] = field(default_factory=list)

    def each(self, value: Callable[[Result], float]) -> list[float]:
        return [value(result) for result in self.results]

    def median(self, value: Callable[[Result], float]) -> float:
        return statistics.median(self.each(value))


def contest(orders: Mapping[str, Order], plan: Plan) -> dict[str, Outcome]:
    """Run every order once per round."""
    outcomes = {name: Outcome() for name in orders}
    for _ in range(plan.rounds):
        for name, order in orders.items():
            await_calm(plan.calm_within_s)
            timed = msgspec.structs.replace(
                order, seconds=plan.seconds, warm_s=min(0.5, plan.seconds)
            )
            outcomes[name].results.append(run(timed))
    return outcomes


def ratios(ours: Outcome, theirs: Outcome, value: Callable[[Result], float]) -> list[float]:
    """Ours over theirs, round by round."""
    return [a / b for a, b in zip(ours.each(value), theirs.each(value), strict=True)]


def remarks(outcomes: Mapping[str, Outcome]) -> str:
    """What a reader must know about the conditions: a busy machine, a busy load generator."""
    every = [result for outcome in outcomes.values() for result in outcome.results]
    others = statistics.median(result.other_cores for result in every)
    notes = [f"others on the machine took {others:.1f} cores"]
    if any(result.own_cores > 0.9 for result in every):
        notes.append("THE LOAD GENERATOR WAS THE LIMIT")
    return "; ".join(notes)


@contextlib.contextmanager
def bare(answer: str) -> Iterator[tuple[int, int]]:
    """The bare applications (`tests.bench.bare`) in a process of their own: port and PID."""
    command = [sys.executable, "-m", "tests.bench.bare", answer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.kill()
