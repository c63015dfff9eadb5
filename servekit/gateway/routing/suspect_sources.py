"""Whose requests take workers down: deaths are held against keys, addresses and exact requests.

`gateway.fate` follows one call through the deaths that it was running in. A client that hangs up at
once, or changes a byte each time, has a new call for each worker that it kills, and so is followed
here. A death is first held against nobody: all that was running in it without proof is suspected.
A suspect that later brings tokens, or an answer, is cleared of it; one that ends otherwise (its
client has hung up, or it was quarantined) is charged, with its share among those that are not
cleared. So what workers are killed by from outside is held against nobody for long, as what was
running comes through in its next attempt; and the neighbours of a request that kills are cleared
while it never is. A request that servekit itself ends for another reason (the model is gone, no
worker is left) is neither cleared nor charged.

One death proves nothing: a worker may be killed from outside just when its clients hang up. Deaths
that repeat are a suspicion, and what tests it is that the source's requests run alone. Each that
comes through so makes all charges against its source lighter: a source without poison is free again
after a dozen requests, however many deaths it was charged with by chance.

A source is the key, where keys are needed, else the client's address. It is tried alone before it
is ever refused. An address may be that of many, who are served beside a poisoner in one line. So it
is refused only where nothing of it has come through since three deaths alone, by this gateway only
(another one may serve the others), and tried again after each refusal.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest

#: After so long a death counts half.
HALF_LIFE_S = 60.0
#: Deaths that are remembered, the last ones, and for how long.
_MOST_DEATHS = 64
_FORGET_S = 600.0
#: Charges at which a source's requests run alone, and at which it may be refused: two deaths and
#: three, less what they lose in half a minute.
_ALONE_AT = 1.4
_REFUSED_AT = 2.2
#: The same of deaths in which, by the worker's word, nothing else could have killed.
_WAITS_AT = 0.4
_SURE_AT = 1.2
#: The same of an address's, if nothing of it has come through since.
_VAIN_AT = 2.2
#: What a charge still weighs after each request of the source that came through alone.
_FADE = 0.97
#: How long a source that waits lets the workers be after a death.
PAUSE_S = 2.0
#: How long a source is refused at first; twice as long each time after that.
REFUSED_S = 30.0


class Verdict(IntEnum):
    """What becomes of a source's next request; the higher the worse."""

    FREE = 0
    ALONE = 1  # it runs beside nothing unproven, until it is proven
    WAITS = 2  # the same, after a pause; if it dies then, that was its last time
    REFUSED = 3


def verdict(deaths: float, sure: float, vain: float | None = None) -> Verdict:
    """What the charges against a source come to.

    `deaths` are those charged, each by its age and the source's share in it; `sure` those of them
    in which the worker had said that nothing else was started. `vain`: of an address, those of
    the sure since which nothing of it has come through; None for a key.

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
    """Whether many may have this source: it is an address."""
    return not source.startswith("key:")


def source_of(call: InflightRequest) -> str:
    """The key of a call, or the address that it came from; "" where neither is known."""
    if call.caller is not None:
        return f"key:{call.caller.rule.name}"
    address = "" if call.origin is None else call.origin.address
    return f"address:{address}" if address else ""


def in_words(source: str) -> str:
    """What a person calls a source."""
    kind, _, name = source.partition(":")
    return f"the {kind} {name!r}"


class Death:
    """One death of a worker, and who may have brought it about. `at_s` is monotonic."""

    __slots__ = ("at_s", "charged", "open", "passed", "sure")

    def __init__(self, at_s: float, sure: bool, marks: Iterable[str]) -> None:
        self.at_s = at_s
        self.sure = sure  # there was but one that it can have been
        self.open = 0  # suspects that are not cleared
        self.charged = Counter(dict.fromkeys(marks, 0))  # by mark: those of them that have ended
        self.passed: dict[str, int] = {}  # by mark: requests that came through alone since

    def share(self, mark: str) -> float:
        """How much of it is held against a source or an exact request."""
        if not self.charged[mark]:
            return 0.0
        return self.charged[mark] / self.open * _FADE ** self.passed.get(mark, 0)


class Suspect:
    """A call as one that may have killed. `marks`: its source, and its fingerprint."""

    __slots__ = ("deaths", "marks")

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.marks = marks
        self.deaths: list[Death] = []


class Sources:
    """What this gateway holds against whom. Times are monotonic, in s."""

    def __init__(self) -> None:
        self._deaths: deque[Death] = deque(maxlen=_MOST_DEATHS)
        self._refused: Counter[str] = Counter()  # how often

    def __bool__(self) -> bool:
        """Whether any death is remembered."""
        return bool(self._deaths)

    def holds(self, now_s: float) -> bool:
        """Whether anything is held against anybody."""
        if not self._deaths:
            return False
        self._forget(now_s)
        return any(any(death.charged.values()) for death in self._deaths)

    def add(self, suspects: list[Suspect], sure: bool, now_s: float) -> None:
        """A worker has died, and these were running without proof. `sure`: only one could."""
        if not suspects:
            return
        self._forget(now_s)
        death = Death(now_s, sure, (mark for suspect in suspects for mark in suspect.marks))
        death.open = len(suspects)
        for suspect in suspects:
            suspect.deaths.append(death)
        self._deaths.append(death)

    def clear(self, suspect: Suspect) -> None:
        """It was not this one: it has brought what it was asked for."""
        for death in suspect.deaths:
            death.open -= 1
        suspect.deaths = []

    def charge(self, suspect: Suspect) -> None:
        """It has ended, and never shown that it is harmless."""
        for death in suspect.deaths:
            death.charged.update(suspect.marks)
        suspect.deaths = []

    def pass_through(self, mark: str, *, alone: bool) -> None:
        """A request of a source has come through; `alone`: as one that was suspected."""
        for death in self._deaths:
            if mark in death.charged:
                death.passed[mark] = death.passed.get(mark, 0) + alone

    def judge(self, mark: str, now_s: float, times: float = 1.0) -> Verdict:
        """What becomes of a source's next request; `times`: how much each death weighs."""
        deaths = sure = vain = 0.0
        for death in self._deaths:
            if share := death.share(mark):
                share *= times * 0.5 ** ((now_s - death.at_s) / HALF_LIFE_S)
                deaths += share
                sure += share if death.sure else 0.0
                vain += share if death.sure and mark not in death.passed else 0.0
        return verdict(deaths, sure, vain if is_shared(mark) else None)

    def pause_s(self, mark: str, now_s: float) -> float:
        """How long a source that waits has to, from now on."""
        last_s = max((one.at_s for one in self._deaths if one.charged[mark]), default=0.0)
        return max(0.0, last_s + PAUSE_S - now_s)

    def refuse_for_s(self, source: str, most_s: float) -> float:
        """A source is about to be refused: for how long. An address is tried again after that."""
        self._refused[source] += 1
        if is_shared(source):
            self.pass_through(source, alone=False)
        return min(most_s, REFUSED_S * 2.0 ** (self._refused[source] - 1))

    def _forget(self, now_s: float) -> None:
        while self._deaths and now_s - self._deaths[0].at_s > _FORGET_S:
            self._deaths.popleft()
        if not self._deaths:
            self._refused.clear()
