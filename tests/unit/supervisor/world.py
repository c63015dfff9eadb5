"""A small world in which the residency policy decides, in steps of simulated time.

It has models with claims on one place, requests that arrive, and workers that take the time they
take. It asserts all the while what must never happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from servekit.protocol.residency import LoadMode, Residency
from servekit.supervisor.model_swap.policy import Decision, decide
from servekit.supervisor.model_swap.types import PolicyInput

STEP_S = 0.1
PLACE = "gpu"


@dataclass(frozen=True)
class Request:
    at: float
    model: str
    takes_s: float = 0.5


@dataclass
class Model:
    name: str
    size: int
    load_s: float = 5.0
    wake_s: float = 1.0
    sleeps: bool = False
    load: LoadMode = "on_demand"
    slots: int = 4
    tier: Residency = "stopped"
    since: float = 0.0
    used_at: float = 0.0
    until: float = 0.0  # when it is done coming, or leaving
    becomes: Residency = "stopped"
    queue: deque[Request] = field(default_factory=deque)
    running: list[tuple[float, Request]] = field(default_factory=list)
    waiting_since: float | None = None

    def facts(self) -> PolicyInput:
        return PolicyInput(
            self.name,
            self.load,
            self.tier,
            {PLACE: self.size},
            can_sleep=self.sleeps,
            since=self.since,
            waiting_since=self.waiting_since,
            busy=bool(self.queue or self.running),
            used_at=self.used_at,
            load_s=self.load_s,
            wake_s=self.wake_s,
        )


class World:
    """`free` bytes in all; requests arrive at their times."""

    def __init__(self, free: int, models: Sequence[Model], requests: Iterable[Request]) -> None:
        self.now = 0.0
        self.size = free
        self.models = {model.name: model for model in models}
        self.coming = deque(sorted(requests, key=lambda request: request.at))
        self.waits: list[float] = []  # of requests that have begun: how long they waited
        self.swaps = 0
        self.loads: dict[str, int] = dict.fromkeys(self.models, 0)

    def run(self, until_s: float) -> None:
        while self.now < until_s and (self.coming or self._busy()):
            self.step()

    def _busy(self) -> bool:
        return any(model.queue or model.running for model in self.models.values())

    def step(self) -> None:
        self.now += STEP_S
        while self.coming and self.coming[0].at <= self.now:
            request = self.coming.popleft()
            self.models[request.model].queue.append(request)
        for model in self.models.values():
            self._live(model)
        held = [model.facts().held_memory.get(PLACE, 0) for model in self.models.values()]
        assert sum(held) <= self.size, "more is held than there is"
        facts = [model.facts() for model in self.models.values()]
        self._carry_out(decide(facts, {PLACE: self.size - sum(held)}, self.now))

    def _live(self, model: Model) -> None:
        if model.tier == "coming" and self.now >= model.until:
            model.tier, model.since, model.used_at = "resident", self.now, self.now
        model.running = [(end, one) for end, one in model.running if end > self.now]
        if model.tier == "leaving" and self.now >= model.until and not model.running:
            model.tier, model.since = model.becomes, self.now
        while model.tier == "resident" and model.queue and len(model.running) < model.slots:
            request = model.queue.popleft()
            self.waits.append(self.now - request.at)
            model.running.append((self.now + request.takes_s, request))
        if model.queue or model.running:
            model.used_at = self.now
        if not model.queue:
            model.waiting_since = None
        elif model.waiting_since is None:
            model.waiting_since = self.now

    def _carry_out(self, decision: Decision) -> None:
        for step in decision.steps:
            model = self.models[step.model]
            match step.kind:
                case "load" | "wake":
                    assert model.tier == ("stopped" if step.kind == "load" else "asleep")
                    took_s = model.load_s if step.kind == "load" else model.wake_s
                    model.tier, model.until = "coming", self.now + took_s
                    self.swaps += 1
                    self.loads[model.name] += 1
                case "sleep" | "stop":
                    assert model.tier in ("resident", "asleep"), "it was loading, or going"
                    assert model.load == "on_demand"
                    model.becomes = "asleep" if step.kind == "sleep" else "stopped"
                    model.tier, model.until = "leaving", self.now + STEP_S
            model.since = self.now
