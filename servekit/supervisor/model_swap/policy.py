"""Which models are loaded, woken, put to sleep and stopped: a pure function of facts and a clock.

    tier       fact                                                  step
    resident   unused for longer than its keep_alive, or             Stop
               `idle_unload_s`
               unused for longer than `idle_sleep_s`                 Sleep
               another waits for its memory, and it has been quiet   Sleep or Stop
               for `linger_s`
               another waits for its memory, and it has been here    Sleep or Stop, once what runs
               for its turn, `turn_s`, though it is busy             is done; what is new waits
    asleep     somebody waits for it, and there is room              Wake
               unused for longer than its keep_alive or              Stop
               `idle_unload_s`; another needs what it still holds
    stopped    somebody waits for it, and there is room              Load
    coming     any                                                   none: never while it loads;
                                                                     others go if it lacks room
    leaving    any                                                   none: it is under way
    failed     any                                                   none: who waits is told

Only models of `load: on_demand` make room for others. Who goes first is whose score is highest:

    bytes that it frees where they lack × seconds since it was used ÷ seconds to bring it back

What frees much, is long unused and cheap to have again goes first; one whose client has asked that
it stay goes last. Nobody goes where that would not be enough. An evicted model sleeps where it can
and the host has the memory for it, else it is stopped.

Who waits longest is served first, and what is free or becomes free is kept for it: no stream of
small models can starve a large one. A model that has just come has a turn, in proportion to what
the swap costs: requests that alternate between two models which do not fit together are served in
groups, and while both are busy about a fifth of the time at most goes into swapping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servekit.supervisor.model_swap.capacity_view import CapacityView, told
from servekit.supervisor.model_swap.eviction import gone, make_room, relieve
from servekit.supervisor.model_swap.types import PolicyInput, SwapAction

#: From a client's word that a model is to go to the report of the request it came with.
HEARD_S = 0.5


@dataclass(frozen=True, slots=True)
class Decision:
    """Steps to begin now, and what those wait for that are not helped yet."""

    steps: tuple[SwapAction, ...]
    waits: Mapping[str, str]


def decide(models: Sequence[PolicyInput], free: Mapping[str, int], now: float) -> Decision:
    """`free` is what nobody holds at each place; a place that it does not name has no end."""
    room = CapacityView(free, models)
    steps = [step for one in models if (step := _leave(one, room, now)) is not None]
    leaving = {step.model for step in steps}
    staying = [one for one in models if one.name not in leaving]
    waits = {one.name: said for one in staying if (said := _restless(one, room))}
    for one in sorted(staying, key=_order):
        if one.name in leaving:
            continue
        others = [other for other in staying if other is not one and other.name not in leaving]
        made, waits_for = _help(one, others, room, now)
        steps += made
        leaving |= {step.model for step in made}
        if waits_for:
            waits[one.name] = waits_for
    return Decision(tuple(steps), waits)


def _order(one: PolicyInput) -> tuple[bool, float]:
    """Those that come already, and then who waits longest."""
    return not one.has_claim, one.waiting_since or math.inf


def _help(
    one: PolicyInput, others: Sequence[PolicyInput], room: CapacityView, now: float
) -> tuple[list[SwapAction], str]:
    """What is done for it, and what it waits for."""
    if one.has_claim:
        return relieve(one, others, room, now)
    if one.waiting_since is None or one.tier not in ("stopped", "asleep"):
        return [], ""
    if room.fits(one.need):
        room.take(one.need)
        return [SwapAction("load" if one.tier == "stopped" else "wake", one.name)], ""
    return make_room(one, others, room, now)


def leaves_in_s(one: PolicyInput, now: float) -> float | None:
    """How long until it goes by itself, as things stand; None: it stays until others need room."""
    limits = [limit for limit, _ in _limits(one) if not math.isinf(limit)]
    if not limits or one.tier not in ("resident", "asleep"):
        return None
    return max(0.0, min(limits) - one.quiet_s(now))


def _leave(one: PolicyInput, room: CapacityView, now: float) -> SwapAction | None:
    """Whether it goes by itself: an operator wants it, or nobody does."""
    if one.tier not in ("resident", "asleep"):
        return None
    if one.wish:
        return _go(one, room, "by an operator", sleeps=one.wish == "sleep")
    if one.waiting_since is not None or one.busy:
        return None
    quiet_s = one.quiet_s(now)
    due = [(limit, sleeps) for limit, sleeps in _limits(one) if quiet_s >= limit]
    if not due or (now - one.told_at < HEARD_S and one.stay_s is not None):
        return None
    said = "as its client had asked" if one.stay_s is not None else f"unused for {quiet_s:.0f} s"
    return _go(one, room, said, sleeps=all(sleeps for _, sleeps in due))


def _limits(one: PolicyInput) -> list[tuple[float, bool]]:
    """After how much quiet it goes, and whether to sleep."""
    if one.stay_s is not None:
        return [(one.stay_s, False)]
    limits = [] if one.idle_unload_s is None else [(one.idle_unload_s, False)]
    if one.idle_sleep_s is not None and one.tier == "resident" and one.can_sleep:
        limits.append((one.idle_sleep_s, True))
    return limits


def _restless(one: PolicyInput, room: CapacityView) -> str:
    """Why one does not sleep that an operator wants to: the host lacks memory for it."""
    lacks = room.lacks_asleep([one]) if one.wish == "sleep" and one.tier == "resident" else {}
    if not lacks or not one.can_sleep:
        return ""
    at = max(lacks, key=lacks.__getitem__)
    there = told(max(0, room.now[at]))
    return f"asleep it takes {told(one.asleep[at])} of the host's memory, where {there} can be had"


def _go(one: PolicyInput, room: CapacityView, reason: str, *, sleeps: bool) -> SwapAction | None:
    """The step; none for one that sleeps already, or stays because there is no room to sleep."""
    if sleeps and not room.can_hold_asleep([one]):
        return None
    return gone(one, room, reason, sleeps=sleeps)
