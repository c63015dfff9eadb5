"""Suspicion against keys, addresses and fingerprints whose requests may kill workers.

`retry_policy` follows one call through the deaths in which it was running. A client that hangs up
at once, or changes a byte each time, makes a new call for each worker that it kills, and is
followed here. At first a death is charged to no source; all unproven calls that were running are
suspects. A suspect that later brings tokens or an answer is cleared. A suspect that ends otherwise
(its client has hung up, or it was quarantined) is charged with its share among those not cleared.
A kill from outside is thus charged to nobody for long, because its suspects come through in their
next attempt. The neighbours of a killing request are cleared, while that request never is. A
request that servekit itself ends for another reason (the model is gone, no worker is left) is
neither cleared nor charged.

One death proves nothing: a worker may be killed from outside just when its clients hang up.
Repeated deaths are a suspicion, which is tested by running the source's requests alone. Each
request that then comes through reduces all charges against its source: a harmless source is free
again after a dozen requests, however many deaths it was charged with by chance.

A source is the key, if keys are needed, else the client's address. Its requests run alone before
they are ever refused. Many clients may share an address with a malicious one. An address is
therefore refused only if none of its requests has come through since three deaths in isolation, and
it is tried again after each refusal. One of several gateways never refuses an address, because the
requests that come through at the others are unknown to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest

#: Time after which a death counts half.
HALF_LIFE_S = 60.0
#: Limits on the number and age of the deaths that are remembered.
_MOST_DEATHS = 64
_FORGET_S = 600.0
#: Charges at which a source's requests run alone, and at which it may be refused: two and three
#: deaths, less their decay in half a minute.
_ALONE_AT = 1.4
_REFUSED_AT = 2.2
#: Thresholds for sure deaths, in which the worker had announced that the suspect ran alone.
_WAITS_AT = 0.4
_SURE_AT = 1.2
#: Threshold for an address's sure deaths since which none of its requests has come through.
_VAIN_AT = 2.2
#: Factor on a charge for each request of the source that came through alone.
_FADE = 0.97
#: Pause after a death, before the next request of a source with the verdict WAITS.
PAUSE_S = 2.0
#: Duration of a source's first refusal; it doubles with each further one.
REFUSED_S = 30.0


class Verdict(IntEnum):
    """The treatment of a source's next request; higher is worse."""

    FREE = 0
    ALONE = 1  # runs without other unproven calls, until it is proven
    WAITS = 2  # the same, after a pause; a key's call is quarantined if it dies then
    REFUSED = 3


def verdict(deaths: float, sure: float, vain: float | None = None) -> Verdict:
    """Return the verdict for the charges against a source.

    `deaths` is the sum of its charged deaths, each weighted by age and by the source's share.
    `sure` is the part in which the worker had announced that the suspect ran alone. `vain` is, for
    an address, the part of `sure` since which none of its requests has come through; None for a
    key.

    deaths           sure             vain           verdict
    less than 1.4    any              any            FREE
    1.4 or more      less than 0.4    any            ALONE
    1.4 or more      0.4 up to 1.2    any            WAITS
    1.4 up to 2.2    1.2 or more      any            WAITS
    2.2 or more      1.2 or more      None           REFUSED
    2.2 or more      1.2 or more      less than 2.2  WAITS
    2.2 or more      1.2 or more      2.2 or more    REFUSED
    """
    if deaths < _ALONE_AT:
        return Verdict.FREE
    if sure < _WAITS_AT:
        return Verdict.ALONE
    if deaths < _REFUSED_AT or sure < _SURE_AT or (vain is not None and vain < _VAIN_AT):
        return Verdict.WAITS
    return Verdict.REFUSED


def is_shared(source: str) -> bool:
    """Return whether many clients may share this source, because it is an address."""
    return not source.startswith("key:")


def source_of(call: InflightRequest) -> str:
    """Return the key of a call, else its client's address; "" if neither is known."""
    if call.caller is not None:
        return f"key:{call.caller.rule.name}"
    address = "" if call.origin is None else call.origin.address
    return f"address:{address}" if address else ""


def in_words(source: str) -> str:
    """Return a source as text for people."""
    kind, _, name = source.partition(":")
    return f"the {kind} {name!r}"


class Death:
    """A worker's death and its possible causes. `at_s` is monotonic."""

    __slots__ = ("at_s", "charged", "open", "passed", "sure")

    def __init__(self, at_s: float, sure: bool, marks: Iterable[str]) -> None:
        self.at_s = at_s
        self.sure = sure  # only one call can have caused it
        self.open = 0  # suspects that are not cleared
        self.charged = Counter(dict.fromkeys(marks, 0))  # charged suspects, by mark
        self.passed: dict[str, int] = {}  # requests that came through alone since, by mark

    def share(self, mark: str) -> float:
        """Return the share of this death that is charged to a source or a fingerprint, 0 to 1."""
        if not self.charged[mark]:
            return 0.0
        return self.charged[mark] / self.open * _FADE ** self.passed.get(mark, 0)


class Suspect:
    """A call that may have killed workers. `marks` are its source and its fingerprint."""

    __slots__ = ("deaths", "marks")

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.marks = marks
        self.deaths: list[Death] = []


class Sources:
    """The charges of this gateway against sources and fingerprints. Times are monotonic, in s.

    `sees_all`: this gateway is the only one, so that every request passes through it.
    """

    def __init__(self) -> None:
        self.sees_all = True
        self._deaths: deque[Death] = deque(maxlen=_MOST_DEATHS)
        self._refused: Counter[str] = Counter()  # how often

    def __bool__(self) -> bool:
        """Return whether any death is remembered."""
        return bool(self._deaths)

    def holds(self, now_s: float) -> bool:
        """Return whether any mark is charged with a death."""
        if not self._deaths:
            return False
        self._forget(now_s)
        return any(any(death.charged.values()) for death in self._deaths)

    def add(self, suspects: list[Suspect], sure: bool, now_s: float) -> None:
        """Record a worker's death with the unproven calls that were running.

        `sure`: the worker had announced that one suspect ran alone.
        """
        if not suspects:
            return
        self._forget(now_s)
        death = Death(now_s, sure, (mark for suspect in suspects for mark in suspect.marks))
        death.open = len(suspects)
        for suspect in suspects:
            suspect.deaths.append(death)
        self._deaths.append(death)

    def clear(self, suspect: Suspect) -> None:
        """Clear a suspect that has brought tokens or an answer."""
        for death in suspect.deaths:
            death.open -= 1
        suspect.deaths = []

    def charge(self, suspect: Suspect) -> None:
        """Charge a suspect that has ended without showing that it is harmless."""
        for death in suspect.deaths:
            death.charged.update(suspect.marks)
        suspect.deaths = []

    def pass_through(self, mark: str, *, alone: bool) -> None:
        """Count a request of a source that has come through; `alone`: run in isolation."""
        for death in self._deaths:
            if mark in death.charged:
                death.passed[mark] = death.passed.get(mark, 0) + alone

    def judge(self, mark: str, now_s: float, times: float = 1.0) -> Verdict:
        """Return the verdict on a source or fingerprint; `times` is the weight of each death."""
        deaths = sure = vain = 0.0
        for death in self._deaths:
            if share := death.share(mark):
                share *= times * 0.5 ** ((now_s - death.at_s) / HALF_LIFE_S)
                deaths += share
                sure += share if death.sure else 0.0
                in_vain = self.sees_all and death.sure and mark not in death.passed
                vain += share if in_vain else 0.0
        return verdict(deaths, sure, vain if is_shared(mark) else None)

    def pause_s(self, mark: str, now_s: float) -> float:
        """Return the remaining pause of a source with the verdict WAITS."""
        last_s = max((one.at_s for one in self._deaths if one.charged[mark]), default=0.0)
        return max(0.0, last_s + PAUSE_S - now_s)

    def refuse_for_s(self, source: str, most_s: float) -> float:
        """Count a refusal of a source, and return its duration, at most `most_s`.

        The deaths of an address stop counting as `vain`, so that it is tried again afterwards.
        """
        self._refused[source] += 1
        if is_shared(source):
            self.pass_through(source, alone=False)
        return min(most_s, REFUSED_S * 2.0 ** (self._refused[source] - 1))

    def _forget(self, now_s: float) -> None:
        while self._deaths and now_s - self._deaths[0].at_s > _FORGET_S:
            self._deaths.popleft()
        if not self._deaths:
            self._refused.clear()
