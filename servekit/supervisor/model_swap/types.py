"""What the residency policy is told of a model, and what it says is to be done with one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from servekit.protocol.residency import LoadMode, Residency

#: How long a model is taken to need that was never loaded here.
UNKNOWN_S = 10.0

Kind = Literal["load", "wake", "sleep", "stop"]


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """One model. Times are on the caller's clock, in s; amounts in bytes by place."""

    name: str
    load: LoadMode
    tier: Residency
    claim: Mapping[str, int]  # while it is resident
    asleep: Mapping[str, int] = field(default_factory=dict)  # while it sleeps
    can_sleep: bool = False
    falls_asleep: bool = False  # leaving, it is put to sleep
    since: float = 0.0  # in this tier
    lacks: Mapping[str, int] = field(default_factory=dict)  # coming, it does not find so much free
    waiting_since: float | None = None  # the oldest request, or an operator's
    busy: bool = False  # requests wait or run
    used_at: float = 0.0
    load_s: float = UNKNOWN_S
    wake_s: float = UNKNOWN_S
    stay_s: float | None = None  # by a client's keep_alive; None: as the file has it
    told_at: float = 0.0  # when that was said
    idle_sleep_s: float | None = None
    idle_unload_s: float | None = None
    wish: Literal["", "unload", "sleep"] = ""  # an operator's

    @property
    def back_s(self) -> float:
        """What it costs to have it again."""
        asleep = self.tier == "asleep" or (self.tier == "resident" and self.can_sleep)
        return self.wake_s if asleep else self.load_s

    @property
    def held(self) -> Mapping[str, int]:
        """What it holds now."""
        if self.tier in ("resident", "coming", "leaving"):
            return self.claim
        return self.asleep if self.tier == "asleep" else {}

    @property
    def need(self) -> Mapping[str, int]:
        """What it takes beyond what it holds to be resident."""
        held = self.held
        return {at: more for at, size in self.claim.items() if (more := size - held.get(at, 0)) > 0}

    @property
    def has_claim(self) -> bool:
        """It is coming, or there for good: others go where it lacks room."""
        return self.tier == "coming" or (self.tier == "resident" and self.load != "on_demand")

    def quiet_s(self, now: float) -> float:
        return 0.0 if self.busy else now - max(self.used_at, self.since)


@dataclass(frozen=True, slots=True)
class SwapAction:
    """What is to be done with a model; `reason` completes "stopped: …"."""

    kind: Kind
    model: str
    reason: str = ""
    makes_room: bool = False  # it goes for another's sake, and will be wanted again
