"""Free memory at each place, now and soon, while a decision is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from servekit.supervisor.model_swap.types import PolicyInput


class CapacityView:
    """Free memory now, and after the models that are leaving have left."""

    def __init__(self, free: Mapping[str, int], models: Iterable[PolicyInput]) -> None:
        self.now = dict(free)
        self.soon = dict(free)
        self._freed = dict.fromkeys(free, 0)
        for one in models:
            if one.tier == "leaving":
                self.leave(one, one.asleep if one.falls_asleep else {})

    def fits(self, need: Mapping[str, int]) -> bool:
        return not lacking(need, self.now) and not lacking(need, self.soon)

    def lacks(self, need: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes that are missing even after the leaving models have left."""
        return lacking(need, self.soon)

    def wants(self, one: PolicyInput) -> dict[str, int]:
        """Return the bytes that are missing for a model that has its claim already.

        Leaving models count as gone. Claims may exceed the memory after a reload of the
        configuration, and the free memory may be less than what is not claimed, if other programs
        hold some.
        """
        over = {at: -self.soon[at] for at in one.claim if at in self.soon}
        short = {at: size - self._freed[at] for at, size in one.lacks.items() if at in self.soon}
        most = {at: max(over.get(at, 0), short.get(at, 0)) for at in {*over, *short}}
        return {at: size for at, size in most.items() if size > 0}

    def take(self, need: Mapping[str, int]) -> None:
        """Give the memory away, now and soon."""
        self.keep(need)
        for at, size in need.items():
            if at in self.now:
                self.now[at] -= size

    def keep(self, need: Mapping[str, int]) -> None:
        """Keep that much of the future free memory for one model."""
        for at, size in need.items():
            if at in self.soon:
                self.soon[at] -= size

    def leave(self, one: PolicyInput, kept: Mapping[str, int]) -> None:
        """Free what the model holds, except `kept`; what it takes at other places is in use now."""
        for at, size in one.held.items():
            if at in self.soon:
                self.soon[at] += size
                self._freed[at] += size - kept.get(at, 0)
        self.keep(kept)
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
    held = one.held
    return {at: more for at, size in kept.items() if (more := size - held.get(at, 0)) > 0}


def lacking(need: Mapping[str, int], room: Mapping[str, int]) -> dict[str, int]:
    return {at: size - room[at] for at, size in need.items() if at in room and size > room[at]}
