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
    coming     any                                                   none: never while it loads
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from servekit.wire.residency import LoadMode, Residency

#: How long a model is taken to need that was never loaded here.
UNKNOWN_S = 10.0
#: A turn is so many times what the swap costs, and within these.
TURNS = 4.0
LEAST_TURN_S, LONGEST_TURN_S = 2.0, 60.0
#: A model is quiet once it had nothing to do for so much of what the swap costs, within these: the
#: client that has its answer may be about to ask again.
LINGERS = 0.1
LEAST_LINGER_S, LONGEST_LINGER_S = 0.05, 1.0
#: From a client's word that a model is to go to the report of the request it came with.
HEARD_S = 0.5

#: How a wait ends that nothing can be done about.
STAY = "and the others stay"

Kind = Literal["load", "wake", "sleep", "stop"]


@dataclass(frozen=True, slots=True)
class Facts:
    """One model. Times are on the caller's clock, in s; amounts in bytes by place."""

    name: str
    load: LoadMode
    tier: Residency
    claim: Mapping[str, int]  # while it is resident
    asleep: Mapping[str, int] = field(default_factory=dict)  # while it sleeps
    can_sleep: bool = False
    since: float = 0.0  # in this tier
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

    def quiet_s(self, now: float) -> float:
        return 0.0 if self.busy else now - max(self.used_at, self.since)


@dataclass(frozen=True, slots=True)
class Step:
    """What is to be done with a model; `reason` completes "stopped: …"."""

    kind: Kind
    model: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Steps to begin now, and what those wait for that are not helped yet."""

    steps: tuple[Step, ...]
    waits: Mapping[str, str]


def decide(models: Sequence[Facts], free: Mapping[str, int], now: float) -> Decision:
    """`free` is what nobody holds at each place; a place that it does not name has no end."""
    room = _Room(free, models)
    steps = [step for one in models if (step := _leave(one, room, now)) is not None]
    leaving = {step.model for step in steps}
    staying = [one for one in models if one.name not in leaving]
    waits: dict[str, str] = {}
    for one in sorted(staying, key=lambda each: each.waiting_since or math.inf):
        if one.waiting_since is None or one.tier not in ("stopped", "asleep"):
            continue
        if room.fits(one.need):
            steps.append(Step("load" if one.tier == "stopped" else "wake", one.name))
            room.take(one.need)
            continue
        others = [other for other in staying if other is not one and other.name not in leaving]
        made, waits[one.name] = _make_room(one, others, room, now)
        leaving |= {step.model for step in made}
        steps += made
    return Decision(tuple(steps), waits)


def linger_s(victim: Facts, other: Facts) -> float:
    """How long it has to be quiet before it makes room."""
    return min(max(LEAST_LINGER_S, LINGERS * _swap_s(victim, other)), LONGEST_LINGER_S)


def turn_s(victim: Facts, other: Facts) -> float:
    """How long it may be busy while the other waits."""
    return min(max(LEAST_TURN_S, TURNS * _swap_s(victim, other)), LONGEST_TURN_S)


def _swap_s(victim: Facts, other: Facts) -> float:
    return victim.back_s + other.back_s


def leaves_in_s(one: Facts, now: float) -> float | None:
    """How long until it goes by itself, as things stand; None: it stays until others need room."""
    limits = [limit for limit, _ in _limits(one) if not math.isinf(limit)]
    if not limits or one.tier not in ("resident", "asleep"):
        return None
    return max(0.0, min(limits) - one.quiet_s(now))


class _Room:
    """What is free now, and what will be once those that leave have left."""

    def __init__(self, free: Mapping[str, int], models: Iterable[Facts]) -> None:
        self.now = dict(free)
        self.soon = dict(free)
        for one in models:
            if one.tier == "leaving":
                self._will_free(one.held)

    def _will_free(self, held: Mapping[str, int]) -> None:
        for at, size in held.items():
            if at in self.soon:
                self.soon[at] += size

    def fits(self, need: Mapping[str, int]) -> bool:
        return not _lacking(need, self.now) and not _lacking(need, self.soon)

    def lacks(self, need: Mapping[str, int]) -> dict[str, int]:
        """What lacks even when those that leave have left."""
        return _lacking(need, self.soon)

    def take(self, need: Mapping[str, int]) -> None:
        """That is given away."""
        self.keep(need)
        for at, size in need.items():
            if at in self.now:
                self.now[at] -= size

    def keep(self, need: Mapping[str, int]) -> None:
        """Of what will be free, nobody else gets that."""
        for at, size in need.items():
            if at in self.soon:
                self.soon[at] -= size

    def leave(self, one: Facts, kept: Mapping[str, int]) -> None:
        """It gives back what it holds, but for what it keeps."""
        self._will_free(one.held)
        self.take(kept)


def _lacking(need: Mapping[str, int], room: Mapping[str, int]) -> dict[str, int]:
    return {at: size - room[at] for at, size in need.items() if at in room and size > room[at]}


def _leave(one: Facts, room: _Room, now: float) -> Step | None:
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


def _limits(one: Facts) -> list[tuple[float, bool]]:
    """After how much quiet it goes, and whether to sleep."""
    if one.stay_s is not None:
        return [(one.stay_s, False)]
    limits = [] if one.idle_unload_s is None else [(one.idle_unload_s, False)]
    if one.idle_sleep_s is not None and one.tier == "resident" and one.can_sleep:
        limits.append((one.idle_sleep_s, True))
    return limits


def _go(one: Facts, room: _Room, reason: str, *, sleeps: bool) -> Step | None:
    """The step; none for one that sleeps already, or stays because there is no room to sleep."""
    if sleeps and not _can_sleep(one, room):
        return None
    return _gone(one, room, reason, sleeps=sleeps)


def _gone(one: Facts, room: _Room, reason: str, *, sleeps: bool) -> Step:
    room.leave(one, one.asleep if sleeps else {})
    return Step("sleep" if sleeps else "stop", one.name, reason)


def _can_sleep(one: Facts, room: _Room) -> bool:
    """Whether there is memory for what it holds asleep, where it does not hold as much now."""
    if one.tier != "resident" or not one.can_sleep:
        return False
    held = one.held
    more = {at: size - held.get(at, 0) for at, size in one.asleep.items()}
    return not _lacking({at: size for at, size in more.items() if size > 0}, room.now)


def _make_room(
    one: Facts, others: Sequence[Facts], room: _Room, now: float
) -> tuple[list[Step], str]:
    """Who goes for it, if that is enough; and what it waits for. What will be free is kept."""
    lacking = room.lacks(one.need)
    goers = [other for other in others if other.load == "on_demand"]
    goers = [other for other in goers if any(other.held.get(at) for at in lacking)]
    able = [other for other in goers if other.tier in ("resident", "asleep")]
    short = _short(one, room)
    if not _covers(able, lacking):
        # those that are coming may go once they have come
        if _covers(goers, lacking):
            return [], f"{short}; it waits for {_names(goers)}"
        return [], f"{short}, {STAY}"
    ready = [other for other in able if _may_go(other, one, now)]
    victims = _victims(ready, lacking, now)
    sleepers = _sleepers(victims, lacking, room)
    reason = f"evicted for {one.name}, {short}"
    steps = [_gone(each, room, reason, sleeps=each in sleepers) for each in victims]
    room.keep(one.need)
    names = _names(victims or able) or "what is leaving"
    return steps, f"{short}; it waits for {names}"


def _names(models: Iterable[Facts]) -> str:
    return ", ".join(sorted(one.name for one in models))


def _short(one: Facts, room: _Room) -> str:
    """ "30.0 GiB needed, 12.0 GiB free", of the place that lacks most."""
    at = max(one.need, key=lambda place: one.need[place] - room.now.get(place, math.inf))
    return f"{_told(one.need[at])} needed, {_told(max(0, room.now.get(at, 0)))} free"


def _may_go(victim: Facts, other: Facts, now: float) -> bool:
    if not victim.busy:
        return victim.quiet_s(now) >= linger_s(victim, other)
    return now - victim.since >= turn_s(victim, other)


def _covers(
    victims: Iterable[Facts], lacking: Mapping[str, int], sleepers: Iterable[Facts] = ()
) -> bool:
    """Whether they free what lacks; `sleepers` are those of them that go on holding some."""
    goers, asleep = list(victims), list(sleepers)
    return all(
        sum(one.held.get(at, 0) for one in goers) - sum(one.asleep.get(at, 0) for one in asleep)
        >= size
        for at, size in lacking.items()
    )


def _victims(ready: Sequence[Facts], lacking: Mapping[str, int], now: float) -> list[Facts]:
    """The fewest of the highest scores that free enough; none if all of them do not."""

    def score(one: Facts) -> tuple[bool, float, float]:
        stays = one.stay_s is not None and math.isinf(one.stay_s)
        freed = sum(min(one.held.get(at, 0), size) for at, size in lacking.items())
        return not stays, freed * one.quiet_s(now) / max(one.back_s, 0.1), -one.since

    chosen: list[Facts] = []
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


def _sleepers(victims: Sequence[Facts], lacking: Mapping[str, int], room: _Room) -> list[Facts]:
    """Those of them that may sleep: all that can, but for the quickest to load that may not."""
    able = [one for one in victims if _can_sleep(one, room)]
    able.sort(key=lambda one: one.load_s)
    while able and not _covers(victims, lacking, able):
        able.pop(0)
    return able


def _told(size_bytes: int) -> str:
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.1f} GiB"
    return f"{size_bytes / 2**20:.0f} MiB"
