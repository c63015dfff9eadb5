"""One model under load in simulated time, scaled by the real policy: to see what it does.

Requests come by chance at a rate that changes, wait in one queue, and run in the slots of replicas
for a time by chance. What the policy is told is as old as it is in an instance: a second at most.
A replica that is added takes `load_s` to serve; one that goes finishes what it runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import quantiles

from servekit.supervisor.autoscaling.policy import Limits, Past, ScalingInput, decide

LOOK_S = 0.2
REPORT_S = 1.0

#: Requests a second, by time in s.
Rate = Callable[[float], float]


@dataclass
class Replica:
    ready_s: float
    running: int = 0
    leaving: bool = False


@dataclass
class Outcome:
    """What came of it. Times in s."""

    waits: list[float] = field(default_factory=list)
    changes: list[tuple[float, int]] = field(default_factory=list)  # when, and to how many
    replica_s: float = 0.0  # what it cost
    most: int = 0

    @property
    def p99_s(self) -> float:
        return quantiles(self.waits, n=100)[98]

    @property
    def ups(self) -> int:
        counts = [count for _, count in self.changes]
        return sum(b > a for a, b in itertools.pairwise(counts))

    @property
    def turns(self) -> int:
        """How often it went down after up, or up after down."""
        counts = [count for _, count in self.changes]
        signs = [b > a for a, b in itertools.pairwise(counts)]
        return sum(a != b for a, b in itertools.pairwise(signs))


class Model:
    """`limits` None: as many replicas as it begins with, always."""

    def __init__(
        self,
        rate: Rate,
        most_rate: float,
        limits: Limits | None,
        *,
        begins: int = 1,
        slots: int = 4,
        service_s: float = 1.0,
        load_s: float = 20.0,
        seed: int = 0,
    ) -> None:
        self._rate, self._most_rate, self._limits = rate, most_rate, limits
        self._slots, self._service_s, self._load_s = slots, service_s, load_s
        self._chance = random.Random(seed)
        self._replicas = [Replica(0.0) for _ in range(begins)]
        self._queue: deque[float] = deque()
        self._serial = itertools.count()
        self._ends: list[tuple[float, int, Replica]] = []
        self._told = 0, 0.0, 0  # queued, when the first of them came, running; as last reported
        self.outcome = Outcome(changes=[(0.0, begins)], most=begins)

    def run(self, for_s: float) -> Outcome:
        """Let time pass, and requests come."""
        past, came_s = Past(), self._next(0.0)
        for look in range(int(for_s / LOOK_S)):
            now = look * LOOK_S
            while came_s <= now or (self._ends and self._ends[0][0] <= now):
                if self._ends and self._ends[0][0] <= came_s:
                    self._end(*heapq.heappop(self._ends))
                else:
                    self._queue.append(came_s)
                    self._fill(came_s)
                    came_s = self._next(came_s)
            self._fill(now)
            if look % round(REPORT_S / LOOK_S) == 0:
                running = sum(one.running for one in self._replicas)
                self._told = len(self._queue), next(iter(self._queue), now), running
            if self._limits is not None:
                past = self._scale(self._limits, past, now)
            self.outcome.replica_s += LOOK_S * len(self._replicas)
        self.outcome.waits += [for_s - came for came in self._queue]  # those that never ran
        return self.outcome

    def _next(self, now: float) -> float:
        """When the next request comes (thinned, for the rate changes)."""
        while True:
            now += self._chance.expovariate(self._most_rate)
            if self._chance.random() * self._most_rate < self._rate(now):
                return now

    def _end(self, at: float, _: int, replica: Replica) -> None:
        replica.running -= 1
        if replica.leaving and not replica.running:
            self._replicas.remove(replica)
        self._fill(at)

    def _fill(self, now: float) -> None:
        able = [one for one in self._replicas if one.ready_s <= now and not one.leaving]
        while self._queue:
            replica = min(able, key=lambda one: one.running)
            if replica.running >= self._slots:
                return
            came = self._queue.popleft()
            self.outcome.waits.append(now - came)
            replica.running += 1
            ends = now + self._chance.expovariate(1 / self._service_s)
            heapq.heappush(self._ends, (ends, next(self._serial), replica))

    def _scale(self, limits: Limits, past: Past, now: float) -> Past:
        living = [one for one in self._replicas if not one.leaving]
        serving = [one for one in living if one.ready_s <= now]
        queued, since, running = self._told
        facts = ScalingInput(
            serving=len(serving),
            coming=len(living) - len(serving),
            slots=self._slots,
            queued=queued,
            waited_s=now - since if queued else 0.0,
            running=running,
        )
        step, past = decide(limits, facts, past, now)
        if step is not None:
            self._change(step.change, serving, now)
            count = len(living) + step.change
            self.outcome.changes.append((now, count))
            self.outcome.most = max(self.outcome.most, count)
        return past

    def _change(self, change: int, serving: list[Replica], now: float) -> None:
        self._replicas += [Replica(now + self._load_s) for _ in range(max(0, change))]
        for replica in sorted(serving, key=lambda one: one.running)[: max(0, -change)]:
            replica.leaving = True
            if not replica.running:
                self._replicas.remove(replica)


# ---------------------------------------------------------------- loads


def step(low: float, high: float, at_s: float, until_s: float = math.inf) -> Rate:
    return lambda now: high if at_s <= now < until_s else low


def ramp(low: float, high: float, over_s: float) -> Rate:
    return lambda now: low + (high - low) * min(1.0, now / over_s)


def sawtooth(low: float, high: float, every_s: float) -> Rate:
    return lambda now: low + (high - low) * (now % every_s) / every_s


def steady(rate: float) -> Rate:
    return lambda now: rate
