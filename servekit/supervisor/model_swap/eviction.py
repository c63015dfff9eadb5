"""Choice of the models to evict: a pure function for `policy`, whose docstring has the rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from servekit.supervisor.model_swap.types import PolicyInput, SwapAction
from servekit.units import format_bytes


class CapacityView:
    """Free memory now, and after the models that are leaving have left."""

    def __init__(self, free: Mapping[str, int], models: Iterable[PolicyInput]) -> None:
        self.now = dict(free)
        self.soon = dict(free)
        self._freed = dict.fromkeys(free, 0)
        self.promised: list[PolicyInput] = []  # to models on demand, as if they were loading
        for one in models:
            if one.tier == "leaving":
                self.free_model(one, one.asleep if one.falls_asleep else {})

    def has_bytes(self, need: Mapping[str, int]) -> bool:
        return not lacking(need, self.now) and not lacking(need, self.soon)

    def missing_bytes(self, need: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes that are missing even after the leaving models have left."""
        return lacking(need, self.soon)

    def missing_for_claimed(self, one: PolicyInput) -> dict[str, int]:
        """Return the bytes that are missing for a model that has its claim already.

        Leaving models count as gone. Claims may exceed the memory after a reload of the
        configuration, and the free memory may be less than what is not claimed, if other programs
        hold some.
        """
        over = {at: -self.soon[at] for at in one.claim if at in self.soon}
        short = {at: size - self._freed[at] for at, size in one.lacks.items() if at in self.soon}
        most = {at: max(over.get(at, 0), short.get(at, 0)) for at in {*over, *short}}
        return {at: size for at, size in most.items() if size > 0}

    def subtract(self, one: PolicyInput) -> None:
        """Give a model the memory that it needs, now and soon."""
        self.promise(one)
        for at, size in one.needed_memory.items():
            if at in self.now:
                self.now[at] -= size

    def promise(self, one: PolicyInput) -> None:
        """Keep the memory that a model needs for it."""
        self.reserve(one.needed_memory)
        if one.load == "on_demand":
            self.promised.append(replace(one, tier="coming"))

    def reserve(self, need: Mapping[str, int]) -> None:
        """Keep that much of the future free memory for one model."""
        for at, size in need.items():
            if at in self.soon:
                self.soon[at] -= size

    def free_model(self, one: PolicyInput, kept: Mapping[str, int]) -> None:
        """Free what the model holds, except `kept`; what it takes at other places is in use now."""
        for at, size in one.held_memory.items():
            if at in self.soon:
                self.soon[at] += size
                self._freed[at] += size - kept.get(at, 0)
        self.reserve(kept)
        for at, size in _more(one, kept).items():
            if at in self.now:
                self.now[at] -= size

    def lacks_asleep(self, models: Sequence[PolicyInput]) -> dict[str, int]:
        """Return the bytes that are missing now for all these models to sleep."""
        more: dict[str, int] = {}
        for one in models:
            for at, size in _more(one, one.asleep).items():
                more[at] = more.get(at, 0) + size
        return lacking(more, self.now)

    def can_hold_asleep(self, models: Sequence[PolicyInput]) -> bool:
        """Return whether all these models can sleep, and there is memory for that."""
        able = all(one.tier == "resident" and one.can_sleep for one in models)
        return able and not self.lacks_asleep(models)


def _more(one: PolicyInput, kept: Mapping[str, int]) -> dict[str, int]:
    """Return the part of `kept` that exceeds what the model holds now."""
    held = one.held_memory
    return {at: more for at, size in kept.items() if (more := size - held.get(at, 0)) > 0}


def lacking(need: Mapping[str, int], room: Mapping[str, int]) -> dict[str, int]:
    return {at: size - room[at] for at, size in need.items() if at in room and size > room[at]}


#: A turn is TURNS times the cost of the swap, within these limits.
TURNS = 4.0
LEAST_TURN_S, LONGEST_TURN_S = 2.0, 60.0
#: A model is quiet after having no work for LINGERS times the cost of the swap, within these
#: limits: a client that has its answer may be about to ask again.
LINGERS = 0.1
LEAST_LINGER_S, LONGEST_LINGER_S = 0.05, 1.0

#: Ends the description of a wait that no eviction can end.
STAY = "and the others stay"


def make_room(
    one: PolicyInput, others: Sequence[PolicyInput], room: CapacityView, now: float
) -> tuple[list[SwapAction], str]:
    """Return the evictions for a model, if they are enough, and what it waits for.

    Memory that becomes free is reserved for it.
    """
    lacking = room.missing_bytes(one.needed_memory)
    goers = _candidates(others, lacking)
    able = _evictable(goers)
    short = _short(one, room)
    if not _covers(able, lacking):
        # models that are loading, or that load first, may be evicted once loaded
        goers = _candidates([*goers, *room.promised], lacking)
        if _covers(goers, lacking):
            return [], f"{short}; it waits for {_names(goers)}"
        return [], f"{short}, {STAY}"
    steps = _evict(able, one, lacking, room, now, short)
    room.promise(one)
    names = _names(able, steps) or "a model that is unloading"
    return steps, f"{short}; it waits for {names}"


def relieve(
    one: PolicyInput, others: Sequence[PolicyInput], room: CapacityView, now: float
) -> tuple[list[SwapAction], str]:
    """Do the same for a model that has its claim already; "" if it waits for no eviction."""
    lacking = room.missing_for_claimed(one)
    able = _evictable(_candidates(others, lacking))
    if not lacking or not _covers(able, lacking):
        return [], ""
    short = format_bytes(max(lacking.values()))
    steps = _evict(able, one, lacking, room, now, f"which lacks {short}")
    return steps, f"it lacks {short}; it waits for {_names(able, steps)}"


def _candidates(others: Iterable[PolicyInput], lacking: Mapping[str, int]) -> list[PolicyInput]:
    """Return eviction candidates that hold memory at a place that is short."""
    goers = [other for other in others if other.load == "on_demand"]
    return [other for other in goers if any(other.held_memory.get(at) for at in lacking)]


def _evictable(goers: Iterable[PolicyInput]) -> list[PolicyInput]:
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
    steps = (remove_model(each, room, reason, sleeps=each in sleepers) for each in victims)
    return [replace(step, makes_room=True) for step in steps]


def _names(able: Iterable[PolicyInput], steps: Sequence[SwapAction] = ()) -> str:
    """Return the names of the models that are evicted, or else of those that can be."""
    going = [step.model for step in steps] or [one.name for one in able]
    return ", ".join(sorted(going))


def _short(one: PolicyInput, room: CapacityView) -> str:
    """Return such as "30.0 GiB needed, 12.0 GiB free", for the place that is shortest."""

    def free(place: str) -> float:  # without what is kept for others
        return min(room.now.get(place, math.inf), room.soon.get(place, math.inf))

    at = max(one.needed_memory, key=lambda place: one.needed_memory[place] - free(place))
    free_bytes = int(max(0, free(at)))
    return f"{format_bytes(one.needed_memory[at])} needed, {format_bytes(free_bytes)} free"


def _may_go(victim: PolicyInput, other: PolicyInput, now: float) -> bool:
    if not victim.busy:
        return victim.quiet_s(now) >= linger_s(victim, other)
    return now - victim.since >= turn_s(victim, other)


def _covers(
    victims: Iterable[PolicyInput], lacking: Mapping[str, int], sleepers: Iterable[PolicyInput] = ()
) -> bool:
    """Return whether the victims free enough; `sleepers` keep some of their memory."""
    goers, asleep = list(victims), list(sleepers)
    return all(
        sum(one.held_memory.get(at, 0) for one in goers)
        - sum(one.asleep.get(at, 0) for one in asleep)
        >= size
        for at, size in lacking.items()
    )


def _victims(
    ready: Sequence[PolicyInput], lacking: Mapping[str, int], now: float
) -> list[PolicyInput]:
    """Return the fewest models with the highest scores that free enough; none if all cannot."""

    def score(one: PolicyInput) -> tuple[bool, float, float]:
        stays = one.stay_s is not None and math.isinf(one.stay_s)
        freed = sum(min(one.held_memory.get(at, 0), size) for at, size in lacking.items())
        return not stays, freed * one.quiet_s(now) / max(one.back_s, 0.1), -one.since

    chosen: list[PolicyInput] = []
    for one in sorted(ready, key=score, reverse=True):
        if _covers(chosen, lacking):
            break
        chosen.append(one)
    if not _covers(chosen, lacking):
        return []
    for one in list(chosen):  # keep a model if a later, larger victim made it unnecessary
        rest = [other for other in chosen if other is not one]
        if _covers(rest, lacking):
            chosen = rest
    return chosen


def _sleepers(
    victims: Sequence[PolicyInput], lacking: Mapping[str, int], room: CapacityView
) -> list[PolicyInput]:
    """Return the victims to put to sleep: all that can, except the quickest to load if need be."""
    able = [one for one in victims if room.can_hold_asleep([one])]
    able.sort(key=lambda one: one.load_s)
    while able and not (_covers(victims, lacking, able) and room.can_hold_asleep(able)):
        able.pop(0)
    return able


def remove_model(one: PolicyInput, room: CapacityView, reason: str, *, sleeps: bool) -> SwapAction:
    """Return the action that removes the model, and count its memory as free soon."""
    room.free_model(one, one.asleep if sleeps else {})
    return SwapAction("sleep" if sleeps else "stop", one.name, reason)


def linger_s(victim: PolicyInput, other: PolicyInput) -> float:
    """Return how long the victim has to be quiet before it is evicted, in seconds."""
    return min(max(LEAST_LINGER_S, LINGERS * _swap_s(victim, other)), LONGEST_LINGER_S)


def turn_s(victim: PolicyInput, other: PolicyInput) -> float:
    """Return how long the victim may stay busy while the other waits, in seconds."""
    return min(max(LEAST_TURN_S, TURNS * _swap_s(victim, other)), LONGEST_TURN_S)


def _swap_s(victim: PolicyInput, other: PolicyInput) -> float:
    return victim.back_s + other.back_s
