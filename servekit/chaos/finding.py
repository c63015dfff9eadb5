"""What an experiment found, and what it was given to find it with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from servekit.chaos.baseline_answers import Known, Tally
from servekit.chaos.load import Load
from servekit.chaos.target import Target

#: Long enough for the scheduler to give others their turns.
_SPIN_S = 0.1
#: Beyond this others compute, too.
_BUSY = 1.2

Verdict = Literal["kept", "broken", "skipped"]


class Finding(msgspec.Struct, frozen=True):
    """One row of the table. `notice_s`, `whole_s`: from the deed until it was noticed, and until
    all of the instance served again; None where the question makes no sense or has no answer."""

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
class Scene:
    """What every experiment gets: the instance, questions with their undisturbed answers, how
    long the load goes on after the deed, and how many clients there are."""

    target: Target
    known: Sequence[Known]
    seconds: float = 5.0
    streams: int = 8
    wholes: int = 4
    memory_bytes: int = 0  # 0: leave the memory alone

    def load(self) -> Load:
        return Load(self.target.client, self.known, self.streams, self.wholes)


def slowness() -> float:
    """How many times longer than alone a process takes here now, for others that compute; >= 1.

    Promises are made for a machine that has time: their limits are stretched by this.
    """
    began_s, used_s = time.perf_counter(), time.process_time()
    while time.process_time() - used_s < _SPIN_S:
        pass
    return max(1.0, (time.perf_counter() - began_s) / _SPIN_S)


@dataclass(slots=True)
class Judge:
    """Gathers broken promises, and makes the finding of them."""

    experiment: str
    deed: str
    slowness: float = field(default_factory=slowness)
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def promise(self, kept: bool, else_: str) -> None:
        if not kept:
            self.broken.append(else_)

    def clean(self, tally: Tally) -> None:
        """Every request was answered, and as if nothing had happened."""
        self.promise(tally.clean, tally.complaints())
        self.promise(tally.answered > 0, "nothing was answered at all")

    def soon(self, what: str, took_s: float | None, limit_s: float) -> None:
        took = "never" if took_s is None else f"{took_s:.2f} s"
        busy_s = 2 * limit_s * self.slowness  # twice: what others do varies
        allowed_s = busy_s if self.slowness > _BUSY else limit_s
        kept = took_s is not None and took_s <= allowed_s
        busy = f" on a machine {self.slowness:.1f} times as slow" if self.slowness > _BUSY else ""
        self.promise(kept, f"{what}: {took}, promised within {limit_s:g} s{busy}")

    def skip(self, why: str) -> Finding:
        return Finding(self.experiment, self.deed, "skipped", detail=why)

    def finding(
        self,
        tally: Tally | None = None,
        notice_s: float | None = None,
        whole_s: float | None = None,
    ) -> Finding:
        counted = tally or Tally()
        return Finding(
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
