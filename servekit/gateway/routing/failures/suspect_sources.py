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
it is tried again after each refusal. A malicious client whose neighbours come through is slowed
down, not refused: the pause grows with the deaths.

All gateways judge by the same facts, whichever of them served a source. A gateway reports news, and
the supervisor forwards them (`SourceReport`); a refusal is a quarantine entry of all gateways:

    at a gateway                                              to the other gateways
    a worker dies, unproven calls were running                its part in the death
    such a call is cleared or charged                         its part, once more
    a request of one of their sources comes through alone     one more alone
    the first comes through since a death in isolation        that some came through
    a source is refused                                       that it is, so that it counts for all
    anything else                                             nothing

The parts of one death add up, because each gateway knows only its own calls. A gateway that starts
later knows of later news only, and of the refusals in force.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from servekit.protocol.messages import DeathReport, SourceReport

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
#: Pause before the next request of a source with the verdict WAITS, for each of its sure deaths, at
#: least one; and its limit.
PAUSE_S = 2.0
MOST_PAUSE_S = 30.0
#: Duration of a source's first refusal; it doubles with each further one.
REFUSED_S = 30.0
#: A thousand more would overflow.
_MOST_DOUBLINGS = 32


class Verdict(IntEnum):
    """The treatment of a source's next request; higher is worse."""

    FREE = 0
    ALONE = 1  # runs without other unproven calls, until it is proven
    WAITS = 2  # the same, after a pause, also in a second attempt; a key's call has only one
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
    """A worker's death and its possible causes. `at_s` is monotonic.

    `open` and `charged` are of this gateway's calls, `elsewhere` has those of the others.
    """

    __slots__ = ("at_s", "charged", "elsewhere", "open", "passed", "sure", "worker")

    def __init__(self, worker: str, at_s: float, sure: bool) -> None:
        self.worker = worker
        self.at_s = at_s
        self.sure = sure  # only one call can have caused it
        self.open = 0  # suspects that are not cleared
        self.charged: Counter[str] = Counter()  # charged suspects, by mark; 0 for the others
        self.elsewhere: dict[str, DeathReport] = {}  # by gateway
        self.passed: dict[str, int] = {}  # requests that came through alone since, by mark

    def __contains__(self, mark: str) -> bool:
        """Return whether a suspect has this mark."""
        return mark in self.charged or any(mark in one.charged for one in self.elsewhere.values())

    def marks(self) -> set[str]:
        """Return the marks that are charged."""
        parts = (self.charged, *(one.charged for one in self.elsewhere.values()))
        return {mark for charged in parts for mark, count in charged.items() if count}

    def charged_share(self, mark: str, fade: float = _FADE) -> float:
        """Return the share of this death that is charged to a source or a fingerprint, 0 to 1.

        `fade`: its factor for each request that came through alone since.
        """
        others = self.elsewhere.values()
        charged = self.charged[mark] + sum(one.charged.get(mark, 0) for one in others)
        if not charged:
            return 0.0
        suspects = self.open + sum(one.open for one in others)
        return charged / suspects * fade ** self.passed.get(mark, 0)

    def report(self, now_s: float) -> DeathReport:
        """Return this gateway's part."""
        return DeathReport(self.worker, self.sure, now_s - self.at_s, self.open, dict(self.charged))


class Suspect:
    """A call that may have killed workers. `marks` are its source and its fingerprint."""

    __slots__ = ("deaths", "marks")

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.marks = marks
        self.deaths: list[Death] = []


class Charges(NamedTuple):
    """The charges against a mark, as `verdict` takes them."""

    deaths: float = 0.0
    sure: float = 0.0
    vain: float = 0.0


class Sources:
    """The charges of all gateways against sources and fingerprints. Times are monotonic, in s.

    `on_news` is called when there is something to report to the other gateways, if there are any.
    """

    def __init__(self, on_news: Callable[[], object] = lambda: None) -> None:
        self.has_peers = False  # there are other gateways
        self._on_news = on_news
        self._numbers = itertools.count()
        self.deaths: dict[str, Death] = {}  # by worker, the oldest first
        self._refused: Counter[str] = Counter()  # how often
        self._charged: set[str] | None = None  # charged marks; None: not known
        self._changed: dict[str, Death] = {}  # by worker; this and the following are news
        self._passed: Counter[str] = Counter()
        self._refusals: list[str] = []
        self._announced = False

    def has_suspects(self, now_s: float) -> bool:
        """Return whether any mark is charged with a death."""
        if not self.deaths:
            return False
        self._forget(now_s)
        return bool(self._charged_marks())

    def add_death(
        self, suspects: list[Suspect], sure: bool, now_s: float, worker: str = ""
    ) -> None:
        """Record a worker's death with the unproven calls that were running.

        `sure`: the worker had announced that one suspect ran alone. `worker` is its socket.
        """
        if not suspects:
            return
        self._forget(now_s)
        death = self._remember(self._name(worker), now_s, sure)
        death.charged.update(dict.fromkeys((m for one in suspects for m in one.marks), 0))
        death.open += len(suspects)
        for suspect in suspects:
            suspect.deaths.append(death)
        self._report(death)

    def clear_suspect(self, suspect: Suspect) -> None:
        """Clear a suspect that has brought tokens or an answer."""
        for death in suspect.deaths:
            death.open -= 1
            self._report(death)
        suspect.deaths = []

    def charge_suspect(self, suspect: Suspect) -> None:
        """Charge a suspect that has ended without showing that it is harmless."""
        for death in suspect.deaths:
            death.charged.update(suspect.marks)
            self._report(death)
        suspect.deaths = []
        self._charged = None

    def pass_through(self, mark: str, *, alone: bool) -> None:
        """Count a request of a source that has come through; `alone`: run in isolation."""
        if self._count_passed(mark, int(alone)) and self.has_peers:
            self._passed[mark] += alone
            self._announce()

    def _count_passed(self, mark: str, alone: int) -> bool:
        """Count requests of a source that have come through; return whether it matters."""
        matters = False
        for death in self.deaths.values():
            if mark in death:
                matters = matters or alone > 0 or (death.sure and mark not in death.passed)
                death.passed[mark] = death.passed.get(mark, 0) + alone
        return matters

    # ---- verdicts

    def judge(self, mark: str, now_s: float, times: float = 1.0) -> Verdict:
        """Return the verdict on a source or fingerprint; `times` is the weight of each death."""
        if mark not in self._charged_marks():
            return Verdict.FREE
        deaths, sure, vain = (times * weight for weight in self._weigh(mark, now_s))
        return verdict(deaths, sure, vain if is_shared(mark) else None)

    def pause_s(self, mark: str, now_s: float) -> float:
        """Return the remaining pause of a source with the verdict WAITS."""
        last_s = max(
            (one.at_s for one in self.deaths.values() if one.charged_share(mark)), default=0.0
        )
        return max(0.0, last_s + self.whole_pause_s(mark, now_s) - now_s)

    def whole_pause_s(self, mark: str, now_s: float) -> float:
        """Return the pause after a death of a source with the verdict WAITS.

        Requests that came through do not shorten it: they are those of innocent neighbours.
        """
        sure = self._weigh(mark, now_s, fade=1.0).sure
        return min(MOST_PAUSE_S, PAUSE_S * max(1.0, sure))

    def _weigh(self, mark: str, now_s: float, fade: float = _FADE) -> Charges:
        deaths = sure = vain = 0.0
        for death in self.deaths.values():
            if share := death.charged_share(mark, fade):
                share *= 0.5 ** ((now_s - death.at_s) / HALF_LIFE_S)
                deaths += share
                sure += share if death.sure else 0.0
                vain += share if death.sure and mark not in death.passed else 0.0
        return Charges(deaths, sure, vain)

    def refuse_for_s(self, source: str, most_s: float) -> float:
        """Count a refusal of a source, and return its duration, at most `most_s`."""
        self._count_refusal(source)
        if self.has_peers:
            self._refusals.append(source)
            self._announce()
        doublings = min(self._refused[source] - 1, _MOST_DOUBLINGS)
        return min(most_s, REFUSED_S * 2.0**doublings)

    def _count_refusal(self, source: str) -> None:
        """Count a refusal of a source.

        The deaths of an address stop counting as `vain`, so that it is tried again afterwards.
        """
        self._refused[source] += 1
        if is_shared(source):
            self._count_passed(source, 0)

    # ---- the other gateways

    def take_report(self, gateway: str, now_s: float) -> SourceReport:
        """Return the news of this gateway for the others."""
        deaths = tuple(death.report(now_s) for death in self._changed.values())
        news = SourceReport(gateway, deaths, dict(self._passed), tuple(self._refusals))
        self._changed, self._passed, self._refusals = {}, Counter(), []
        self._announced = False
        return news

    def add_report(self, news: SourceReport, now_s: float) -> None:
        """Add the news of another gateway."""
        self._forget(now_s)
        for one in news.deaths:
            death = self._remember(one.worker, now_s - one.age_s, one.sure)
            death.elsewhere[news.gateway] = one
        for source, alone in news.passed.items():
            self._count_passed(source, alone)
        for source in news.refused:
            self._count_refusal(source)
        self._charged = None

    def _report(self, death: Death) -> None:
        if self.has_peers and self.deaths.get(death.worker) is death:
            self._changed[death.worker] = death
            self._announce()

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._on_news()

    # ---- memory

    def _charged_marks(self) -> set[str]:
        if self._charged is None:
            self._charged = {mark for one in self.deaths.values() for mark in one.marks()}
        return self._charged

    def _name(self, worker: str) -> str:
        """Return a name for a death: the worker's, unless its connection was lost before."""
        known = self.deaths.get(worker)
        is_ours = known is not None and bool(known.charged)
        return f"{worker} {next(self._numbers)}" if is_ours or not worker else worker

    def _remember(self, worker: str, at_s: float, sure: bool) -> Death:
        """Return the death of a worker, which another gateway may have reported already."""
        death = self.deaths.get(worker)
        if death is None:
            if len(self.deaths) >= _MOST_DEATHS:
                self._drop_oldest()
            death = self.deaths[worker] = Death(worker, at_s, sure)
        death.sure = death.sure or sure
        return death

    def _forget(self, now_s: float) -> None:
        while self.deaths and now_s - next(iter(self.deaths.values())).at_s > _FORGET_S:
            self._drop_oldest()
        if not self.deaths:
            self._refused.clear()

    def _drop_oldest(self) -> None:
        del self.deaths[next(iter(self.deaths))]
        self._charged = None
