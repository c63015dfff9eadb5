"""Swap policy: which models to load, wake, put to sleep and stop, as a pure function of facts.

    tier       fact                                                  action
    resident   unused for longer than its keep_alive, or             stop
               `idle_unload_s`
               unused for longer than `idle_sleep_s`                 sleep
               another waits for its memory, and it has been quiet   sleep or stop
               for `linger_s`
               another waits for its memory, and it has been busy    sleep or stop after its running
               for its turn, `turn_s`                                requests; new requests wait
    asleep     requests wait for it, and there is room               wake
               unused for longer than its keep_alive or              stop
               `idle_unload_s`; another needs what it still holds
    stopped    requests wait for it, and there is room               load
    coming     any                                                   none: never while it loads;
                                                                     others are evicted if it is
                                                                     short of memory
    leaving    any                                                   none: already under way
    failed     any                                                   none: waiting requests fail

Only models with `load: on_demand` are evicted for others. The model with the highest score is
evicted first:

    bytes freed where they are short × seconds since it was used ÷ seconds to bring it back

So models that free much, are long unused and cheap to load again go first; a model whose client has
asked that it stay goes last. No model is evicted if that would not be enough. An evicted model
sleeps if it can and the host has the memory for it; otherwise it is stopped.

The longest waiting model is served first, and memory that is free or becomes free is reserved for
it: a stream of small models cannot starve a large one. A model that has just been loaded has a turn
in proportion to the cost of the swap: requests that alternate between two models which do not fit
together are served in groups, so that swapping takes about a fifth of the time at most while both
are busy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servekit.supervisor.model_swap.eviction import CapacityView, make_room, relieve, remove_model
from servekit.supervisor.model_swap.types import PolicyInput, SwapAction
from servekit.units import format_bytes

#: Time within which the request that came with a keep_alive is reported, in seconds.
HEARD_S = 0.5


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions to begin now, and by model what it still waits for."""

    steps: tuple[SwapAction, ...]
    waits: Mapping[str, str]


def decide(models: Sequence[PolicyInput], free: Mapping[str, int], now: float) -> Decision:
    """Return the actions for all models. `free` is by place; places not in it are unlimited."""
    room = CapacityView(free, models)
    steps = [step for one in models if (step := _decide_leaving(one, room, now)) is not None]
    leaving = {step.model for step in steps}
    staying = [one for one in models if one.name not in leaving]
    waits = {one.name: said for one in staying if (said := _sleep_obstacle(one, room))}
    for one in sorted(staying, key=_order):
        if one.name in leaving:
            continue
        taken = leaving | {one.name} | {promised.name for promised in room.promised}
        others = [other for other in staying if other.name not in taken]
        made, waits_for = _help(one, others, room, now)
        steps += made
        leaving |= {step.model for step in made}
        if waits_for:
            waits[one.name] = waits_for
    return Decision(tuple(steps), waits)


def _order(one: PolicyInput) -> tuple[bool, float]:
    """Return the sort key: models that are loading already, then the longest waiting."""
    return not one.has_claim, one.waiting_since or math.inf


def _help(
    one: PolicyInput, others: Sequence[PolicyInput], room: CapacityView, now: float
) -> tuple[list[SwapAction], str]:
    """Return the actions for one model, and what it waits for."""
    if one.has_claim:
        return relieve(one, others, room, now)
    if one.waiting_since is None or one.tier not in ("stopped", "asleep"):
        return [], ""
    if room.has_bytes(one.needed_memory):
        room.subtract(one)
        return [SwapAction("load" if one.tier == "stopped" else "wake", one.name)], ""
    return make_room(one, others, room, now)


def leaves_in_s(one: PolicyInput, now: float) -> float | None:
    """Return the seconds until idle limits or keep_alive remove it; None if they do not."""
    limits = [limit for limit, _ in _limits(one) if not math.isinf(limit)]
    if not limits or one.tier not in ("resident", "asleep"):
        return None
    return max(0.0, min(limits) - one.quiet_s(now))


def _decide_leaving(one: PolicyInput, room: CapacityView, now: float) -> SwapAction | None:
    """Return the action for an operator's request, an expired keep_alive or an idle limit."""
    if one.tier not in ("resident", "asleep"):
        return None
    if one.requested:
        return _unload_or_sleep(one, room, "by an operator", sleeps=one.requested == "sleep")
    if one.waiting_since is not None or one.busy:
        return None
    quiet_s = one.quiet_s(now)
    due = [(limit, sleeps) for limit, sleeps in _limits(one) if quiet_s >= limit]
    if not due or (now - one.told_at < HEARD_S and one.stay_s is not None):
        return None
    said = "as its client had asked" if one.stay_s is not None else f"unused for {quiet_s:.0f} s"
    return _unload_or_sleep(one, room, said, sleeps=all(sleeps for _, sleeps in due))


def _limits(one: PolicyInput) -> list[tuple[float, bool]]:
    """Return the limits of idle seconds, and whether the model sleeps (or stops) after each."""
    if one.stay_s is not None:
        return [(one.stay_s, False)]
    limits = [] if one.idle_unload_s is None else [(one.idle_unload_s, False)]
    if one.idle_sleep_s is not None and one.tier == "resident" and one.can_sleep:
        limits.append((one.idle_sleep_s, True))
    return limits


def _sleep_obstacle(one: PolicyInput, room: CapacityView) -> str:
    """Return why a model cannot sleep as an operator requested: host memory is short; or ""."""
    lacks = room.lacks_asleep([one]) if one.requested == "sleep" and one.tier == "resident" else {}
    if not lacks or not one.can_sleep:
        return ""
    at = max(lacks, key=lacks.__getitem__)
    need, there = format_bytes(one.asleep[at]), format_bytes(max(0, room.now[at]))
    return f"asleep it takes {need} of the host's memory, where {there} can be had"


def _unload_or_sleep(
    one: PolicyInput, room: CapacityView, reason: str, *, sleeps: bool
) -> SwapAction | None:
    """Return the action; None if it is to sleep and there is no room for that."""
    if sleeps and not room.can_hold_asleep([one]):
        return None
    return remove_model(one, room, reason, sleeps=sleeps)
