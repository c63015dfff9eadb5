"""Input and output types of the model-swap policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from servekit.protocol.residency import LoadMode, Residency

#: Assumed load time of a model that was never loaded here.
UNKNOWN_S = 10.0

Kind = Literal["load", "wake", "sleep", "stop"]


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """Facts about one model. Times are seconds on the caller's clock, memory bytes by place."""

    name: str
    load: LoadMode
    tier: Residency
    claim: Mapping[str, int]  # while it is resident
    asleep: Mapping[str, int] = field(default_factory=dict)  # while it sleeps
    can_sleep: bool = False
    falls_asleep: bool = False  # it is leaving to sleep
    since: float = 0.0  # start of this tier
    lacks: Mapping[str, int] = field(default_factory=dict)  # loading: bytes that are not free
    waiting_since: float | None = None  # of the oldest request, or an operator's
    busy: bool = False  # requests wait or run
    used_at: float = 0.0
    load_s: float = UNKNOWN_S
    wake_s: float = UNKNOWN_S
    stay_s: float | None = None  # a client's keep_alive; None: as configured
    told_at: float = 0.0  # time of that keep_alive
    idle_sleep_s: float | None = None
    idle_unload_s: float | None = None
    requested: Literal["", "unload", "sleep"] = ""  # an operator's request

    @property
    def back_s(self) -> float:
        """Seconds to make it resident again after an eviction."""
        asleep = self.tier == "asleep" or (self.tier == "resident" and self.can_sleep)
        return self.wake_s if asleep else self.load_s

    @property
    def held_memory(self) -> Mapping[str, int]:
        """Memory that it holds now."""
        if self.tier in ("resident", "coming", "leaving"):
            return self.claim
        return self.asleep if self.tier == "asleep" else {}

    @property
    def needed_memory(self) -> Mapping[str, int]:
        """Memory that it needs beyond what it holds, to be resident."""
        held = self.held_memory
        return {at: more for at, size in self.claim.items() if (more := size - held.get(at, 0)) > 0}

    @property
    def has_claim(self) -> bool:
        """Return whether others are evicted for it: it is loading, or always loaded."""
        return self.tier == "coming" or (self.tier == "resident" and self.load != "on_demand")

    def quiet_s(self, now: float) -> float:
        return 0.0 if self.busy else now - max(self.used_at, self.since)


@dataclass(frozen=True, slots=True)
class SwapAction:
    """An action on a model; `reason` completes "stopped: …"."""

    kind: Kind
    model: str
    reason: str = ""
    makes_room: bool = False  # evicted for another model, and wanted again
