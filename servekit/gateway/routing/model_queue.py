"""One model at this gateway: its queue, its replicas, and the suspects among its calls.

A suspect is a call that was running in two deaths in a row (`gateway.fate`). That it runs alone is
the worker's business, which knows of all gateways' calls (`worker.ward`). Here it is chosen where,
and when:

- On an empty replica. While a worker is being replaced its successor is waited for: that keeps a
  suspect away from the streams under way elsewhere. Only where none is coming it is the replica
  with the least to do.
- One at a time, in turns by key as in the queue. The next follows as soon as the one before is
  proven or done, so that a suspect holds the others up for as long as its first tokens take, not
  for all of its answer.
- The replica is sent nothing else, by any gateway, until its worker says that it takes more: what
  waits here can still go elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from servekit.errors import ModelNotFound, ModelUnavailable, meant
from servekit.gateway.routing.fair_queue import FairQueue
from servekit.gateway.routing.load_balancer import Balancer
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.throughput import ThroughputEstimator
from servekit.gateway.routing.worker_connection import WorkerConnection, base_generation
from servekit.protocol import readiness
from servekit.protocol.messages import Continuation, ModelStatus, ReplicaStatus

#: States of a worker that will, in all likelihood, serve soon, itself or its successor.
COMING = ("starting", "loading", "backoff", "stalled")
#: Between announcements of places in the queue, to those who asked for them.
ANNOUNCE_EVERY_S = 1.0
#: Names that an unknown one is compared with: no more of a client's time than that.
_MOST_COMPARED = 200


class ModelQueue:
    """One model: its status, its queue and its replicas."""

    def __init__(self, status: ModelStatus) -> None:
        self.status = status
        self.queue: FairQueue[InflightRequest] = FairQueue(status.max_queue)
        self.suspects: FairQueue[InflightRequest] = FairQueue(status.max_queue)
        self.choosy: deque[InflightRequest] = (
            deque()
        )  # these wait for certain replicas, see `InflightRequest.is_choosy`
        self._on_trial: InflightRequest | None = None  # the suspect that was sent last
        self.replicas: dict[
            str, WorkerConnection
        ] = {}  # by socket: a new incarnation is a new replica
        self._balancer: Balancer[WorkerConnection] = Balancer()
        self._balancer.set_status(status)
        self.adapters: Sequence[ModelQueue] = ()  # by which requests may name it, too
        self.followers: set[InflightRequest] = set()  # whose clients want to know their places
        self.pace = ThroughputEstimator()
        self.in_flight = 0
        self._tokens_done = self._tokens_told = 0  # given out: by calls that are over; in all
        self.was_ready = False
        self.removed = False  # from the configuration
        self.base: ModelQueue = self  # whose queue and workers these are
        self.expected = 0  # requests that come once the model is known
        self.on_wait: Callable[[ModelQueue], None] | None = None  # of a model that comes and goes

    def set_status(self, status: ModelStatus) -> None:
        self.status = status
        self.queue.limit = self.suspects.limit = status.max_queue
        self._balancer.set_status(status)

    def left(self, call: InflightRequest) -> None:
        """A call for it is over."""
        self.in_flight -= 1
        self._tokens_done += len(call.emitted)

    def tokens(self) -> int:
        """Given out so far, by what runs among them. Counted when asked: nothing is, per token."""
        running = (call for one in self.replicas.values() for call in one.calls.values())
        now = self._tokens_done + sum(len(call.emitted) for call in running)
        self._tokens_told = max(self._tokens_told, now)  # what waits to go on elsewhere is left out
        return self._tokens_told

    # ---- how it stands

    @property
    def ready(self) -> bool:
        """A request sent now can complete."""
        for replica in self.replicas.values():  # noqa: SIM110 - a quarter of a generator's time
            if replica.routable:
                return True
        return False

    @property
    def in_trouble(self) -> bool:
        """All that are ready say that they cannot serve now; they are asked all the same."""
        return readiness.in_trouble(self.status)

    @property
    def running(self) -> int:
        return sum(len(replica.calls) for replica in self.replicas.values())

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.suspects) + len(self.choosy)

    def waited_s(self) -> float:
        """How long the first of those that wait has waited; 0 where none do."""
        rest = (*self.suspects.heads(), *islice(self.choosy, 1))
        came = [call.created_s for call in (*self.queue.heads(), *rest)]
        return time.monotonic() - min(came) if came else 0.0

    @property
    def hopeless(self) -> bool:
        """No worker serves, and none will."""
        residence = self.status.residence
        if residence is not None and residence.tier != "resident":
            manual = residence.tier == "stopped" and residence.load == "manual"
            return manual or residence.tier == "failed"
        return not self._states & {*COMING, "ready"}

    @property
    def available(self) -> bool:
        """A request can complete, if need be after the model has been loaded for it.

        One that only an operator loads is not expected to until he has.
        """
        return readiness.able(self.status, reached=self.ready)

    @property
    def _states(self) -> set[str]:
        return {replica.state for replica in self.status.replicas}

    def check_available(self) -> None:
        """Raise ModelUnavailable unless the model serves, or did and will soon again.

        One that comes and goes is waited for: it is loaded because somebody waits.
        """
        if self.ready:
            return
        residence = self.status.residence
        if residence is not None and residence.tier != "resident" and not self.hopeless:
            return
        states = self._states
        if "ready" in states or (self.was_ready and states & {*COMING}):
            return  # it is being connected to, or replaced: the request waits for that
        raise ModelUnavailable(self._why(), retry_after_s=5.0, param="model")

    def unavailable(self) -> ModelUnavailable:
        """What those are told who wait in vain."""
        return ModelUnavailable(self._why(), retry_after_s=30.0, param="model")

    def _why(self) -> str:
        name = self.status.name
        if not self.hopeless:
            progress = "; ".join(sorted({describe(replica) for replica in self.status.replicas}))
            return f"the model {name!r} is not ready yet: {progress}"
        reasons = [replica.reason for replica in self.status.replicas if replica.reason]
        residence = self.status.residence
        if residence is not None and residence.tier == "stopped":
            return (
                f"the model {name!r} is not loaded; the operator's `servekit load {name}` does it"
            )
        if residence is not None and residence.reason:
            reasons.append(residence.reason)
        return f"the model {name!r} cannot serve: {reasons[0] if reasons else 'it is stopped'}"

    # ---- who runs next

    def best(self, call: InflightRequest) -> WorkerConnection | None:
        """The replica that is to be sent this call now, or None if all are full: see `balance`."""
        if len(self.replicas) > 1:
            return self._balancer.choose(self.replicas.values(), call)
        for replica in self.replicas.values():
            if replica.credits > 0:
                return replica
        return None

    @property
    def has_room(self) -> bool:
        return any(replica.credits > 0 for replica in self.replicas.values())

    def dispatch(self, replica: WorkerConnection) -> None:
        """A replica has room: give it what waits, the suspects first."""
        if self.suspects:
            self._try_suspect()
        if self.choosy:
            self._place_choosy()
        self._fill(replica)

    def dispatch_all(self) -> None:
        """As `dispatch`, for all replicas."""
        if self.suspects:
            self._try_suspect()
        if self.choosy:
            self._place_choosy()
        while len(self.queue) and self.has_room:
            call = self.queue.pop()
            if (replica := self.best(call)) is not None:
                replica.run(call)

    def _fill(self, replica: WorkerConnection) -> None:
        while len(self.queue) and replica.credits > 0:
            self._send(replica, self.queue.pop())
        if len(self.queue):
            replica.borrow()
        elif replica.borrows:
            replica.ease()

    def borrow(self) -> None:
        """Calls wait: ask each replica for slots that other gateways do not use."""
        for replica in self.replicas.values():
            replica.borrow()

    def _send(self, replica: WorkerConnection, call: InflightRequest) -> None:
        if len(self.replicas) > 1:
            self._balancer.note(replica, call)
        replica.run(call)

    def _place_choosy(self) -> None:
        """Send those that wait for certain replicas where these have room."""
        for call in list(self.choosy):
            able = [one for one in self._apt(call) if one.takes(call)]
            if able:
                self.choosy.remove(call)
                self._send(min(able, key=lambda one: (not one.wanted, len(one.calls))), call)

    def _apt(self, call: InflightRequest) -> list[WorkerConnection]:
        """The replicas that can run it: of its generation, and large enough.

        Where none is, and none is coming, it ends sooner on a smaller one, by its length; a call
        that has not begun is told by any that it is too long.
        """
        alike = [one for one in self.replicas.values() if one.suits(call)]
        large = [one for one in alike if one.info and one.info.max_context >= call.least_context]
        waits = call.continuation is not None and self._is_coming(call)
        return large if large or waits else alike

    def _is_coming(self, call: InflightRequest) -> bool:
        """Whether a worker that goes on as the call began is being started, for all we know."""
        return any(
            one.state in COMING and _may_be(one, call.continuation) for one in self.status.replicas
        )

    def goes_on(self, call: InflightRequest) -> bool:
        """Whether what has begun can be gone on with, now or soon.

        A model that comes and goes is loaded again for it; what it is then is seen then. Where no
        worker serves and none will, that is said, and by others.
        """
        if self.hopeless:
            return True
        if any(one.suits(call) and (one.wanted or not call.alone_until) for one in self._connected):
            return True
        residence = self.status.residence
        if residence is not None and residence.tier != "resident":
            return True
        states = (*COMING, "ready")
        return any(
            one.state in states and _may_be(one, call.continuation) for one in self.status.replicas
        )

    @property
    def _connected(self) -> list[WorkerConnection]:
        return [one for one in self.replicas.values() if one.info is not None]

    def take_stranded(self) -> list[InflightRequest]:
        """The calls that wait to be gone on with and cannot be any more; they wait no longer."""
        waiting = (*self.suspects.order(), *self.choosy)
        begun = [call for call in waiting if call.continuation is not None]
        stranded = [call for call in begun if not self.goes_on(call)]
        for call in stranded:
            self.withdraw(call)
        return stranded

    def _try_suspect(self) -> None:
        """Send the next suspect to a worker, unless the one before is still on trial."""
        last = self._on_trial
        if last is not None and last.alone_until and last.replica is not None and not last.proven:
            return
        now_s = time.monotonic()
        for call in self.suspects.order():
            if call.not_before_s <= now_s and (replica := self._ward(call)) is not None:
                self.suspects.remove(call, turn=True)
                self._on_trial = call
                self._send(replica, call)
                return

    def _ward(self, call: InflightRequest) -> WorkerConnection | None:
        """The replica that a suspect does the least harm to; None: wait for a better one."""
        reported = {replica.socket: replica.running for replica in self.status.replicas}

        def load(replica: WorkerConnection) -> int:
            """What it has to do; other gateways' calls are known from the supervisor, and late."""
            return max(len(replica.calls), reported.get(replica.socket, 0))

        every = self._apt(call) if call.is_choosy else self.replicas.values()
        able = [replica for replica in every if replica.has_room]
        best = min(able, key=lambda replica: (load(replica), replica.held), default=None)
        return None if best is None or (load(best) and self._recovering) else best

    @property
    def _recovering(self) -> bool:
        """Another replica, an empty one, is on its way."""
        dialling = any(r.wanted and not r.routable for r in self.replicas.values())
        return dialling or bool(self._states & {*COMING})

    # ---- what waits

    def take_back(self, call: InflightRequest, *, first: bool = True) -> None:
        """A call has lost its worker: it waits again, before all that has not run yet.

        Of the suspects that came back it is the first or the last; last is what has had a turn.
        """
        call.meter.lost(call)
        if not call.alone_until:
            if call.is_choosy:
                self.choosy.append(call)
            else:
                self.queue.give_back(call)
        else:
            self.suspects.give_back(call, first=first)

    def order(self) -> list[InflightRequest]:
        """All calls that wait, in the order they will run."""
        return [*self.suspects.order(), *self.choosy, *self.queue.order()]

    def withdraw(self, call: InflightRequest) -> None:
        """Take a call out of what waits."""
        if call in self.choosy:
            self.choosy.remove(call)
        elif not self.suspects.remove(call):
            self.queue.remove(call)

    def position(self, call: InflightRequest) -> int | None:
        """How many calls are before this one; None once it runs."""
        return next((at for at, other in enumerate(self.order()) if other is call), None)

    def follow(self, call: InflightRequest) -> None:
        """Have a call told its place now and, on change, once a second; see `place_after`."""
        if (place := self.position(call)) is None:
            return
        call.place = place
        if not self.followers:
            asyncio.get_running_loop().call_later(ANNOUNCE_EVERY_S, self._announce_again)
        self.followers.add(call)

    def _announce_again(self) -> None:
        if self.announce():
            asyncio.get_running_loop().call_later(ANNOUNCE_EVERY_S, self._announce_again)

    def announce(self) -> bool:
        """Tell the followers their places where they changed; whether any are left."""
        places = {call: place for place, call in enumerate(self.order())}
        self.followers = {call for call in self.followers if call in places}
        for call in self.followers:
            if call.place != places[call]:
                call.tell(places[call])
        return bool(self.followers)


def _may_be(replica: ReplicaStatus, began: Continuation | None) -> bool:
    """Whether a worker may turn out to be of a generation, as far as is known of it."""
    return began is None or base_generation(began).startswith(replica.generation)


def unknown(model: str, usable: Iterable[ModelStatus]) -> ModelNotFound:
    """Nothing is called so. `usable`: what the caller may use; no other name is told of."""
    found = [*usable]
    aliases = sorted(alias for one in found for alias in one.aliases)
    known = [*sorted(one.name for one in found), *aliases]
    served = f"{', '.join(known) or 'none yet'}{meant(model, known[:_MOST_COMPARED])}"
    said = f"the model {model[:128]!r} is not served here; served are: {served}"
    return ModelNotFound(said, param="model")


def describe(replica: ReplicaStatus) -> str:
    """A replica's state in a few words, with its progress or its reason."""
    progress = replica.progress
    if replica.state in ("starting", "loading") and progress is not None:
        if progress.total:
            return f"{progress.phase} {100 * progress.done // progress.total} %"
        return progress.phase
    return f"{replica.state}: {replica.reason}" if replica.reason else replica.state
