"""Number of replicas of a model between `min` and `max`: a pure function of facts and a clock.

    replicas          fact                                              action
    some serve        a request has waited for `wait_s`, or KV caches   up: one for each `slots`
                      are `kv_used` full for HOLD_S, or requests wait   waiting requests, at most
                      at workers without room for HOLD_S                doubling the replicas
    …                 the same, but the queue shrinks so fast that it   none
                      will be empty within CLEARS_S
    …                 the same, and a replica is starting or failing    none until it serves: it
                                                                        may be all that is needed
    …                 the average load plus random variation would      down: one
                      have fitted into one fewer for `down_s`;
                      for a quarter of that after a removal
    …                 another model waits for the memory of a replica   down: one, at once
                      above the minimum
    one was added     it did not start                                  down: that one; none is
                                                                        added for a while, which
                                                                        doubles each time
    none serves       any                                               none: nothing is known yet

Scaling up is quick, because requests wait; scaling down is slow, because a wrong decision makes
requests wait again. The two use different signals (up: waiting requests; down: idle slots), so that
a constant load never causes both in turn. The random variation of a number of independent requests
is about its square root; twice that is rarely exceeded.

tests/unit/supervisor/scaled.py simulates these rules and their constants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

#: How long KV caches must be full, or workers without room, before a replica is added.
HOLD_S = 5.0
#: A queue that empties within CLEARS_S needs no help; its trend is measured over TREND_S.
CLEARS_S = 10.0
TREND_S = 2.0
#: The KV caches of one replica fewer must stay below this fraction of `kv_used`.
KV_SLACK = 0.8
#: Fraction of `down_s` after which one more may be removed, if the load is still too small.
NEXT = 0.25
#: Pause before the next addition after a replica that did not start: the first, the longest.
SHY_S, SHYEST_S = 60.0, 960.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Configured limits of one model."""

    least: int
    most: int
    wait_s: float = 1.0
    kv_used: float = 0.9
    down_s: float = 120.0


@dataclass(frozen=True, slots=True)
class ScalingInput:
    """Facts about one model, summed over all gateways and workers."""

    serving: int  # replicas
    coming: int = 0  # replicas that start or load
    failing: int = 0  # replicas that should serve, and do not
    slots: int = 1  # concurrent requests per replica
    queued: int = 0  # requests that wait at gateways
    waited_s: float = 0.0  # the longest wait among them
    held: int = 0  # requests at workers that do not run yet
    running: int = 0
    kv_used: float = 0.0  # average of the replicas that serve
    wanted_elsewhere: str = ""  # the model that waits for memory of a replica
    unborn: str = ""  # why an added replica has not started

    @property
    def living(self) -> int:
        return self.serving + self.coming + self.failing

    @property
    def left(self) -> int:
        """Replicas that serve after a removal; a replica that does not serve is removed first."""
        return self.serving if self.failing else self.serving - 1


@dataclass(frozen=True, slots=True)
class Past:
    """State kept from one decision to the next."""

    at: float | None = None  # time of the last decision
    average: float = 0.0  # smoothed number of running and waiting requests
    full_since: float | None = None
    idle_since: float | None = None
    trend: tuple[float, int] | None = None  # time and number of waiting requests
    course: float = 0.0  # growth of the queue, in requests per second
    shy_until: float = -math.inf
    shy_s: float = SHY_S


@dataclass(frozen=True, slots=True)
class ScalingAction:
    """A change in the number of replicas; `reason` completes "scaled up to 3: "."""

    change: int
    reason: str


def decide(
    limits: Limits, facts: ScalingInput, past: Past, now: float
) -> tuple[ScalingAction | None, Past]:
    """Return the action, if any, and the new state; `now` is monotonic, in seconds."""
    past = _observed(limits, facts, past, now)
    if facts.unborn:
        return _give_up(facts, past, now)
    if not facts.serving:
        return None, past
    if facts.wanted_elsewhere and facts.living > limits.least:
        return ScalingAction(-1, f"{facts.wanted_elsewhere} waits for its memory"), past
    if step := _decide_up(limits, facts, past, now):
        return step, replace(past, idle_since=None, full_since=None)
    if step := _decide_down(limits, facts, past, now):
        return step, replace(past, idle_since=now - limits.down_s * (1 - NEXT))
    return None, past


def explain_pressure(limits: Limits, facts: ScalingInput, past: Past, now: float) -> str:
    """Return why more replicas are needed; "" if there are enough."""
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


def _decide_up(limits: Limits, facts: ScalingInput, past: Past, now: float) -> ScalingAction | None:
    room = limits.most - facts.living
    reason = explain_pressure(limits, facts, past, now)
    if not reason or room <= 0 or facts.coming or facts.failing or now < past.shy_until:
        return None
    wanted = math.ceil((facts.queued + facts.held) / facts.slots)
    return ScalingAction(max(1, min(wanted, facts.living, room)), reason)


def _decide_down(
    limits: Limits, facts: ScalingInput, past: Past, now: float
) -> ScalingAction | None:
    since = past.idle_since
    if facts.living <= limits.least or since is None or now - since < limits.down_s:
        return None
    left = facts.left
    return ScalingAction(-1, f"{left} could have carried it for {now - since:.0f} s")


def _give_up(facts: ScalingInput, past: Past, now: float) -> tuple[ScalingAction, Past]:
    shy_s = min(2 * past.shy_s, SHYEST_S)
    step = ScalingAction(-1, f"it did not come up: {facts.unborn}")
    return step, replace(past, shy_until=now + past.shy_s, shy_s=shy_s, idle_since=None)


# ---- state


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
    """Return whether one replica fewer would suffice."""
    left = facts.left
    if left < 1 or facts.coming or 2 * facts.waited_s >= limits.wait_s:
        return False
    kv_used = facts.kv_used * facts.serving / left
    return (
        average + 2 * math.sqrt(average) <= left * facts.slots
        and kv_used <= KV_SLACK * limits.kv_used
    )
