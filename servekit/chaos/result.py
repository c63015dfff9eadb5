"""The findings of experiments, and the scene that each experiment gets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from servekit.chaos.baseline_answers import BaselineAnswer, Tally
from servekit.chaos.load import Load
from servekit.chaos.target import Target

#: CPU time of the probe: long enough for the scheduler to run other processes.
_SPIN_S = 0.1
#: Slowness above which the machine counts as busy.
_BUSY = 1.2

Verdict = Literal["kept", "broken", "skipped"]


class ExperimentResult(msgspec.Struct, frozen=True):
    """A row of the table.

    `notice_s` and `whole_s` are the times from the fault until it was noticed, and until the whole
    instance served again; None if not applicable, or if it never happened.
    """

    experiment: str
    deed: str
    verdict: Verdict
    sent: int = 0
    answered: int = 0
    failed: int = 0
    wrong: int = 0
    notice_s: float | None = None
    whole_s: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ExperimentContext:
    """The inputs of an experiment: the instance, questions with their baseline answers, the
    duration of
    the load after the fault, and the number of clients.
    """

    target: Target
    known: Sequence[BaselineAnswer]
    seconds: float = 5.0
    streams: int = 8
    wholes: int = 4
    memory_bytes: int = 0  # 0: leave the memory alone

    def load(self) -> Load:
        return Load(self.target.client, self.known, self.streams, self.wholes)


def measure_slowness() -> float:
    """Return the factor, at least 1, by which other processes slow down this one now.

    Promises hold for an idle machine: their limits are stretched by this factor.
    """
    began_s, used_s = time.perf_counter(), time.process_time()
    while time.process_time() - used_s < _SPIN_S:
        pass
    return max(1.0, (time.perf_counter() - began_s) / _SPIN_S)


@dataclass(slots=True)
class Judge:
    """A collector of broken promises, which makes the finding."""

    experiment: str
    deed: str
    slowness: float = field(default_factory=measure_slowness)
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def promise(self, kept: bool, else_: str) -> None:
        if not kept:
            self.broken.append(else_)

    def clean(self, tally: Tally) -> None:
        """Promise that every request was answered, with its baseline answer."""
        self.promise(tally.clean, tally.complaints())
        self.promise(tally.answered > 0, "no request was answered")
        if tally.unsure:
            self.notes.append(
                f"the text of {tally.unsure} answers was not checked: to their questions, a stream "
                "and a whole answer differ without a fault, too"
            )

    def expect_within(self, what: str, took_s: float | None, limit_s: float) -> None:
        took = "never" if took_s is None else f"{took_s:.2f} s"
        busy_s = 2 * limit_s * self.slowness  # twice, since other load varies
        allowed_s = busy_s if self.slowness > _BUSY else limit_s
        kept = took_s is not None and took_s <= allowed_s
        busy = f" on a machine {self.slowness:.1f} times as slow" if self.slowness > _BUSY else ""
        self.promise(kept, f"{what}: {took}, promised within {limit_s:g} s{busy}")

    def skip(self, why: str) -> ExperimentResult:
        return ExperimentResult(self.experiment, self.deed, "skipped", detail=why)

    def finding(
        self,
        tally: Tally | None = None,
        notice_s: float | None = None,
        whole_s: float | None = None,
    ) -> ExperimentResult:
        counted = tally or Tally()
        return ExperimentResult(
            experiment=self.experiment,
            deed=self.deed,
            verdict="broken" if self.broken else "kept",
            sent=counted.sent,
            answered=counted.answered,
            failed=counted.failed,
            wrong=counted.wrong,
            notice_s=notice_s,
            whole_s=whole_s,
            detail="; ".join([*self.broken, *self.notes]),
        )
