"""How many replicas a model has between its `min` and `max`: a pure function of facts and a clock.

    replicas          fact                                              step
    some serve        a request has waited for `wait_s`, or KV caches   up: one for each `slots`
                      are `kv_used` full, or requests wait at workers   requests that wait, at most
                      that have no room for them, for HOLD_S            twice as many as there are
    …                 the same, and what waits is less by the second,   none: it helps itself
                      and will be gone within CLEARS_S
    …                 the same, and one is on its way, or failing       none, until it is there: it
                                                                        may be all that it takes
    …                 what there is on average, and what chance adds,   down: one
                      would have fitted into one fewer for `down_s`;
                      after one has gone, for a quarter of that
    …                 another model waits for the memory of one that    down: one, at once
                      is more than the least
    one was added     it did not come up                                down: that one; and for a
                                                                        while, twice as long each
                                                                        time, none is added
    none serves       any                                               none: nothing is known yet

Up is quick, for somebody waits; down is slow, for to be wrong about it makes somebody wait again.
Both ask for different things (up: that requests wait; down: that slots are idle), so that no load
that stays as it is asks for one after the other. What chance adds to a number of requests that come
by themselves is its square root, more or less; twice that is rarely more.

In simulation (tests/unit/supervisor/scaled.py) as many as requests wait for, and at most as many as
there are, have p99 of the wait after a step a fifth (64 slots) to a third (4) shorter than one at a
time, for 7 % fewer to 11 % more replica-seconds; the quarter saves a tenth of those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: How long KV caches must be full, or workers without room, for a replica to be added.
HOLD_S = 5.0
#: What waits may take so long to be gone without help; its course is looked at over TREND_S.
CLEARS_S = 10.0
TREND_S = 2.0
#: How far below `kv_used` the caches of one replica fewer must stay.
KV_SLACK = 0.8
#: After one has gone the next one may in so much of `down_s`, if the load is still too small.
NEXT = 0.25
#: No replica is added for so long after one that did not come up; at most, after many.
SHY_S, SHYEST_S = 60.0, 960.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the file says."""

    least: int
    most: int
    wait_s: float = 1.0
    kv_used: float = 0.9
    down_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ScalingInput:
    """One model now, all gateways and workers together."""

    serving: int  # replicas
    coming: int = 0  # replicas that start or load
    failing: int = 0  # replicas that should serve, and do not
    slots: int = 1  # requests that one replica runs at once
    queued: int = 0  # requests that wait at gateways
    waited_s: float = 0.0  # how long the first of them has
    held: int = 0  # requests that workers have and do not run yet
    running: int = 0
    kv_used: float = 0.0  # of those that serve, on average
    wanted_elsewhere: str = ""  # which model waits for the memory of one of them
    unborn: str = ""  # why one that was added has not come up

    @property
    def living(self) -> int:
        return self.serving + self.coming + self.failing

    @property
    def left(self) -> int:
        """Replicas that serve when one has gone; it is one that does not, where there is any."""
        return self.serving if self.failing else self.serving - 1


@dataclass(frozen=True, slots=True)
class Past:
    """What is remembered from one look to the next."""

    at: float | None = None  # of the last look
    average: float = 0.0  # requests that ran and waited, of late
    full_since: float | None = None
    idle_since: float | None = None
    trend: tuple[float, int] | None = None  # what waited when, a while ago
    course: float = 0.0  # by how many requests a second that grows
    shy_until: float = -math.inf
    shy_s: float = SHY_S


@dataclass(frozen=True, slots=True)
class ScalingAction:
    """By how many replicas to change; `reason` completes "scaled up to 3: "."""

    change: int
    reason: str


def decide(
    limits: Limits, facts: ScalingInput, past: Past, now: float
) -> tuple[ScalingAction | None, Past]:
    """What to do now, and what to remember; `now` in s, never less than before."""
    past = _observed(limits, facts, past, now)
    if facts.unborn:
        return _give_up(facts, past, now)
    if not facts.serving:
        return None, past
    if facts.wanted_elsewhere and facts.living > limits.least:
        return ScalingAction(-1, f"{facts.wanted_elsewhere} waits for its memory"), past
    if step := _up(limits, facts, past, now):
        return step, replace(past, idle_since=None, full_since=None)
    if step := _down(limits, facts, past, now):
        return step, replace(past, idle_since=now - limits.down_s * (1 - NEXT))
    return None, past


def pressed(limits: Limits, facts: ScalingInput, past: Past, now: float) -> str:
    """Why there should be more replicas; "" where there are enough."""
    waiting = facts.queued + facts.held
    if past.course < 0 and waiting < -past.course * CLEARS_S:
        return ""
    if facts.waited_s >= limits.wait_s and facts.queued:
        return f"{facts.queued} waited {facts.waited_s:.1f} s"
    if past.full_since is None or now - past.full_since < HOLD_S:
        return ""
    if facts.kv_used >= limits.kv_used:
        return f"KV caches were {facts.kv_used:.0%} full for {HOLD_S:g} s"
    return f"{facts.held} waited at workers for {HOLD_S:g} s"


def _up(limits: Limits, facts: ScalingInput, past: Past, now: float) -> ScalingAction | None:
    room = limits.most - facts.living
    reason = pressed(limits, facts, past, now)
    if not reason or room <= 0 or facts.coming or facts.failing or now < past.shy_until:
        return None
    wanted = math.ceil((facts.queued + facts.held) / facts.slots)
    return ScalingAction(max(1, min(wanted, facts.living, room)), reason)


def _down(limits: Limits, facts: ScalingInput, past: Past, now: float) -> ScalingAction | None:
    since = past.idle_since
    if facts.living <= limits.least or since is None or now - since < limits.down_s:
        return None
    left = facts.left
    return ScalingAction(-1, f"{left} could have carried it for {now - since:.0f} s")


def _give_up(facts: ScalingInput, past: Past, now: float) -> tuple[ScalingAction, Past]:
    shy_s = min(2 * past.shy_s, SHYEST_S)
    step = ScalingAction(-1, f"it did not come up: {facts.unborn}")
    return step, replace(past, shy_until=now + past.shy_s, shy_s=shy_s, idle_since=None)


# ---- what is remembered


def _observed(limits: Limits, facts: ScalingInput, past: Past, now: float) -> Past:
    passed_s = 0.0 if past.at is None else now - past.at
    load = facts.running + facts.held + facts.queued
    share = 1.0 if past.at is None else -math.expm1(-4 * passed_s / limits.down_s)
    average = past.average + share * (load - past.average)
    past = replace(past, at=now, average=average)
    if now - past.shy_until > past.shy_s:
        past = replace(past, shy_s=SHY_S)
    past = _with_trend(past, facts.queued + facts.held, now)
    full = facts.kv_used >= limits.kv_used or facts.held > 0
    idle = _is_idle(limits, facts, average)
    return replace(
        past,
        full_since=_since(past.full_since, full, now),
        idle_since=_since(past.idle_since, idle, now),
    )


def _since(before: float | None, holds: bool, now: float) -> float | None:
    return None if not holds else now if before is None else before


def _with_trend(past: Past, waiting: int, now: float) -> Past:
    if past.trend is None:
        return replace(past, trend=(now, waiting))
    at, then = past.trend
    if now - at < TREND_S:
        return past
    return replace(past, trend=(now, waiting), course=(waiting - then) / (now - at))


def _is_idle(limits: Limits, facts: ScalingInput, average: float) -> bool:
    """One replica fewer would do."""
    left = facts.left
    if left < 1 or facts.coming or 2 * facts.waited_s >= limits.wait_s:
        return False
    kv_used = facts.kv_used * facts.serving / left
    return (
        average + 2 * math.sqrt(average) <= left * facts.slots
        and kv_used <= KV_SLACK * limits.kv_used
    )
