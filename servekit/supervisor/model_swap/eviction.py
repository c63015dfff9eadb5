"""Who makes room for a model: a pure function, for `residency`, whose docstring has the rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from servekit.supervisor.model_swap.capacity_view import CapacityView, told
from servekit.supervisor.model_swap.types import PolicyInput, SwapAction

#: A turn is so many times what the swap costs, and within these.
TURNS = 4.0
LEAST_TURN_S, LONGEST_TURN_S = 2.0, 60.0
#: A model is quiet once it had nothing to do for so much of what the swap costs, within these: the
#: client that has its answer may be about to ask again.
LINGERS = 0.1
LEAST_LINGER_S, LONGEST_LINGER_S = 0.05, 1.0

#: How a wait ends that nothing can be done about.
STAY = "and the others stay"


def make_room(
    one: PolicyInput, others: Sequence[PolicyInput], room: CapacityView, now: float
) -> tuple[list[SwapAction], str]:
    """Who goes for it, if that is enough; and what it waits for. What will be free is kept."""
    lacking = room.lacks(one.need)
    goers = _goers(others, lacking)
    able = _able(goers)
    short = _short(one, room)
    if not _covers(able, lacking):
        # those that are coming may go once they have come
        if _covers(goers, lacking):
            return [], f"{short}; it waits for {_names(goers)}"
        return [], f"{short}, {STAY}"
    steps = _evict(able, one, lacking, room, now, short)
    room.keep(one.need)
    names = _names(able, steps) or "what is leaving"
    return steps, f"{short}; it waits for {names}"


def relieve(
    one: PolicyInput, others: Sequence[PolicyInput], room: CapacityView, now: float
) -> tuple[list[SwapAction], str]:
    """The same for one that has its claim, and comes; "" where it waits for nobody."""
    lacking = room.wants(one)
    able = _able(_goers(others, lacking))
    if not lacking or not _covers(able, lacking):
        return [], ""
    short = told(max(lacking.values()))
    steps = _evict(able, one, lacking, room, now, f"which lacks {short}")
    return steps, f"it lacks {short}; it waits for {_names(able, steps)}"


def _goers(others: Iterable[PolicyInput], lacking: Mapping[str, int]) -> list[PolicyInput]:
    """Those that may have to go, and hold something of what lacks."""
    goers = [other for other in others if other.load == "on_demand"]
    return [other for other in goers if any(other.held.get(at) for at in lacking)]


def _able(goers: Iterable[PolicyInput]) -> list[PolicyInput]:
    return [other for other in goers if other.tier in ("resident", "asleep")]


def _evict(
    able: Sequence[PolicyInput],
    one: PolicyInput,
    lacking: Mapping[str, int],
    room: CapacityView,
    now: float,
    why: str,
) -> list[SwapAction]:
    victims = _victims([other for other in able if _may_go(other, one, now)], lacking, now)
    sleepers = _sleepers(victims, lacking, room)
    reason = f"evicted for {one.name}, {why}"
    steps = (gone(each, room, reason, sleeps=each in sleepers) for each in victims)
    return [replace(step, makes_room=True) for step in steps]


def _names(able: Iterable[PolicyInput], steps: Sequence[SwapAction] = ()) -> str:
    """Of those that go; else of those that can."""
    going = [step.model for step in steps] or [one.name for one in able]
    return ", ".join(sorted(going))


def _short(one: PolicyInput, room: CapacityView) -> str:
    """ "30.0 GiB needed, 12.0 GiB free", of the place that lacks most."""
    at = max(one.need, key=lambda place: one.need[place] - room.now.get(place, math.inf))
    return f"{told(one.need[at])} needed, {told(max(0, room.now.get(at, 0)))} free"


def _may_go(victim: PolicyInput, other: PolicyInput, now: float) -> bool:
    if not victim.busy:
        return victim.quiet_s(now) >= linger_s(victim, other)
    return now - victim.since >= turn_s(victim, other)


def _covers(
    victims: Iterable[PolicyInput], lacking: Mapping[str, int], sleepers: Iterable[PolicyInput] = ()
) -> bool:
    """Whether they free what lacks; `sleepers` are those of them that go on holding some."""
    goers, asleep = list(victims), list(sleepers)
    return all(
        sum(one.held.get(at, 0) for one in goers) - sum(one.asleep.get(at, 0) for one in asleep)
        >= size
        for at, size in lacking.items()
    )


def _victims(
    ready: Sequence[PolicyInput], lacking: Mapping[str, int], now: float
) -> list[PolicyInput]:
    """The fewest of the highest scores that free enough; none if all of them do not."""

    def score(one: PolicyInput) -> tuple[bool, float, float]:
        stays = one.stay_s is not None and math.isinf(one.stay_s)
        freed = sum(min(one.held.get(at, 0), size) for at, size in lacking.items())
        return not stays, freed * one.quiet_s(now) / max(one.back_s, 0.1), -one.since

    chosen: list[PolicyInput] = []
    for one in sorted(ready, key=score, reverse=True):
        if _covers(chosen, lacking):
            break
        chosen.append(one)
    if not _covers(chosen, lacking):
        return []
    for one in list(chosen):  # one that a later, larger one has made needless stays
        rest = [other for other in chosen if other is not one]
        if _covers(rest, lacking):
            chosen = rest
    return chosen


def _sleepers(
    victims: Sequence[PolicyInput], lacking: Mapping[str, int], room: CapacityView
) -> list[PolicyInput]:
    """Those of them that may sleep: all that can, but for the quickest to load that may not."""
    able = [one for one in victims if room.can_hold_asleep([one])]
    able.sort(key=lambda one: one.load_s)
    while able and not (_covers(victims, lacking, able) and room.can_hold_asleep(able)):
        able.pop(0)
    return able


def gone(one: PolicyInput, room: CapacityView, reason: str, *, sleeps: bool) -> SwapAction:
    """The step by which it goes; what it frees is free soon."""
    room.leave(one, one.asleep if sleeps else {})
    return SwapAction("sleep" if sleeps else "stop", one.name, reason)


def linger_s(victim: PolicyInput, other: PolicyInput) -> float:
    """How long it has to be quiet before it makes room."""
    return min(max(LEAST_LINGER_S, LINGERS * _swap_s(victim, other)), LONGEST_LINGER_S)


def turn_s(victim: PolicyInput, other: PolicyInput) -> float:
    """How long it may be busy while the other waits."""
    return min(max(LEAST_TURN_S, TURNS * _swap_s(victim, other)), LONGEST_TURN_S)


def _swap_s(victim: PolicyInput, other: PolicyInput) -> float:
    return victim.back_s + other.back_s
