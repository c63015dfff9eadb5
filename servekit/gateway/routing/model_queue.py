"""A model at this gateway: its queue, its replicas, and its suspect calls.

A suspect is a call that was running in two worker deaths in a row (`retry_policy`). The worker,
which knows the calls of all gateways, isolates it (`worker.isolation_queue`). This module chooses
its replica and time:

- On an empty replica. While a worker is being replaced, the suspect waits for the successor, which
  keeps it away from running streams. Without a coming successor it gets the least busy replica.
- Never on the last replica that takes ordinary calls, as long as another is being started or runs
  another gateway's suspect. A source of suspects thus does not take the model out of service.
  Once a worker has died of ordinary calls while a suspect waited, it waits in vain: new calls kill
  each worker that comes up. The suspects get the next one, until one of them has killed it.
- One suspect at a time, in turns by key as in the queue. The next one follows as soon as the
  previous one is proven or done, so that a suspect delays the others only until its first tokens.
- The replica gets no other calls, from any gateway, until its worker accepts calls again. Calls
  that wait here can still go to other replicas.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from msgspec.structs import replace

from servekit.errors import ModelNotFound, ModelUnavailable, did_you_mean
from servekit.gateway.routing.balancing.load_balancer import Balancer
from servekit.gateway.routing.fair_queue import FairQueue
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.throughput import ThroughputEstimator
from servekit.gateway.routing.worker_connection import WorkerConnection, base_generation
from servekit.protocol import readiness
from servekit.protocol.messages import Continuation, ModelStatus, ReplicaStatus

#: States of a worker that probably will be ready soon, itself or its successor.
COMING = ("starting", "loading", "backoff", "stalled")
#: Interval of announcements of queue positions to the clients that asked for them.
ANNOUNCE_EVERY_S = 1.0
#: Limit of the names that are compared with an unknown one, to bound the time.
_MOST_COMPARED = 200


class ModelQueue:
    """The status, the queue and the replicas of one model."""

    def __init__(self, status: ModelStatus) -> None:
        self.status = status
        self.queue: FairQueue[InflightRequest] = FairQueue(status.max_queue)
        self.suspects: FairQueue[InflightRequest] = FairQueue(status.max_queue)
        self.choosy: deque[InflightRequest] = (
            deque()
        )  # calls that wait for certain replicas, see `InflightRequest.is_choosy`
        self._on_trial: InflightRequest | None = None  # the last suspect that was sent
        self._ordinary_death_s = 0.0  # time of the last death, 0.0 if a suspect has caused it
        self.replicas: dict[
            str, WorkerConnection
        ] = {}  # by socket: a restarted worker is a new replica
        self._balancer: Balancer[WorkerConnection] = Balancer()
        self._balancer.set_status(status)
        self.adapters: Sequence[ModelQueue] = ()  # routes of the model's adapters
        self.presets: Sequence[ModelQueue] = ()  # and of its presets
        self.followers: set[InflightRequest] = set()  # clients want their positions
        self.pace = ThroughputEstimator()
        self.in_flight = 0
        self._tokens_done = self._tokens_told = 0  # of finished calls; as last reported
        self.was_ready = False
        self.loaded_at_s = time.monotonic()  # or the start of this gateway, where it was before
        self.removed = False  # from the configuration
        self.base: ModelQueue = self  # the owner of the queue and the replicas, see `NamedRoute`
        self.expected = 0  # requests that wait for the model's first `ModelInfo`
        self.on_wait: Callable[[ModelQueue], None] | None = None  # set for swappable models

    def set_status(self, status: ModelStatus) -> None:
        if _is_resident(status) and not _is_resident(self.status):
            self.loaded_at_s = time.monotonic()
        self.status = status
        self.queue.limit = self.suspects.limit = status.max_queue
        self._balancer.set_status(status)

    def left(self, call: InflightRequest) -> None:
        """Count a call of this model as finished."""
        self.in_flight -= 1
        self._tokens_done += len(call.emitted)
        if call is self._on_trial:
            self._on_trial = None  # its prompt may be long

    def generated_tokens(self) -> int:
        """Return the tokens generated so far; computed on demand, at no cost per token."""
        running = (call for one in self.replicas.values() for call in one.calls.values())
        now = self._tokens_done + sum(len(call.emitted) for call in running)
        self._tokens_told = max(self._tokens_told, now)  # `now` lacks waiting continuations
        return self._tokens_told

    # ---- state

    @property
    def ready(self) -> bool:
        """Return whether a request sent now can complete."""
        for replica in self.replicas.values():
            if replica.wanted and replica.info is not None:
                return True
        return False

    @property
    def in_trouble(self) -> bool:
        """Return whether all ready replicas report trouble; requests are sent nevertheless."""
        return readiness.in_trouble(self.status)

    @property
    def running(self) -> int:
        return sum(len(replica.calls) for replica in self.replicas.values())

    @property
    def waiting(self) -> int:
        return len(self.queue) + len(self.suspects) + len(self.choosy)

    def waited_s(self) -> float:
        """Return how long the oldest waiting call has waited; 0 if none waits."""
        rest = (*self.suspects.heads(), *islice(self.choosy, 1))
        came = [call.created_s for call in (*self.queue.heads(), *rest)]
        return time.monotonic() - min(came) if came else 0.0

    @property
    def is_permanently_down(self) -> bool:
        """Return whether no worker is ready and none will be."""
        residence = self.status.residence
        if residence is not None and residence.tier != "resident":
            manual = residence.tier == "stopped" and residence.load == "manual"
            return manual or residence.tier == "failed"
        return not (self._coming or "ready" in self._states)

    @property
    def _coming(self) -> bool:
        """Return whether a worker is being started, or will be once the old version has left."""
        return self.status.changing or bool(self._states & {*COMING})

    @property
    def available(self) -> bool:
        """Return whether a request can complete, perhaps after the model is loaded on demand.

        A model that only an operator loads counts as available while it is unloaded; /readyz thus
        ignores it. `readiness` has the table.
        """
        return readiness.is_able(self.status, reached=self.ready)

    @property
    def _states(self) -> set[str]:
        return {replica.state for replica in self.status.replicas}

    def check_available(self) -> None:
        """Raise ModelUnavailable unless the model is ready, or was ready and soon will be again.

        Requests that wait already are still answered by a model that the profile leaves out. A
        model that is loaded on demand counts as available: a waiting request triggers the load.
        """
        if profile := self.status.left_out:
            said = f"the model {self.status.name!r} is not in the profile {profile!r}, which is in"
            said += " force; `servekit profile` lists and switches them"
            raise ModelUnavailable(said, retry_after_s=30.0, param="model")
        if self.ready:
            return
        residence = self.status.residence
        if residence is not None and residence.tier != "resident" and not self.is_permanently_down:
            return
        was_ready = self.was_ready or self.status.has_served  # at another gateway, or before
        if "ready" in self._states or (was_ready and self._coming):
            return  # the request waits for the connection or the replacement
        raise ModelUnavailable(self._describe_unavailable(), retry_after_s=5.0, param="model")

    def unavailable(self) -> ModelUnavailable:
        """Return the error for calls that wait in vain."""
        return ModelUnavailable(self._describe_unavailable(), retry_after_s=30.0, param="model")

    def _describe_unavailable(self) -> str:
        name = self.status.name
        if not self.is_permanently_down:
            progress = "; ".join(sorted({describe(replica) for replica in self.status.replicas}))
            return f"the model {name!r} is not ready yet: {progress or 'it waits for memory'}"
        reasons = [replica.reason for replica in self.status.replicas if replica.reason]
        residence = self.status.residence
        if residence is not None and residence.tier == "stopped":
            return (
                f"the model {name!r} is not loaded; the operator's `servekit load {name}` does it"
            )
        if residence is not None and residence.reason:
            reasons.append(residence.reason)
        return f"the model {name!r} cannot serve: {reasons[0] if reasons else 'it is stopped'}"

    # ---- dispatch

    def best(self, call: InflightRequest) -> WorkerConnection | None:
        """Return the replica for a call now, None if all are full; see `balancing_policy`."""
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
        """Send waiting calls, suspects first, to a replica that has room."""
        if self.suspects.size:
            self._try_suspect()
        if self.choosy:
            self._place_choosy()
        self._fill(replica)

    def dispatch_all(self) -> None:
        """Send waiting calls to all replicas that have room."""
        if self.suspects.size:
            self._try_suspect()
        if self.choosy:
            self._place_choosy()
        while self.queue.size and self.has_room:
            call = self.queue.pop()
            if (replica := self.best(call)) is not None:
                replica.send_call(call)
        if self.queue.size:
            self.borrow()

    def _fill(self, replica: WorkerConnection) -> None:
        while self.queue.size and replica.credits > 0:
            self._send(replica, self.queue.pop())
        if self.queue.size:
            replica.borrow()
        elif replica.borrows:
            self._return_lent_slots(replica)

    def _return_all_lent_slots(self) -> None:
        """Return the lent slots of all replicas for which no call waits."""
        if not self.queue.size:
            for replica in self.replicas.values():
                if replica.borrows:
                    self._return_lent_slots(replica)

    def _return_lent_slots(self, replica: WorkerConnection) -> None:
        if not any(replica in self._suitable_replicas(call) for call in self.choosy):
            replica.return_lent_slots()

    def borrow(self) -> None:
        """Ask each replica for slots that other gateways do not use, because calls wait."""
        for replica in self.replicas.values():
            replica.borrow()

    def _send(self, replica: WorkerConnection, call: InflightRequest) -> None:
        if len(self.replicas) > 1:
            self._balancer.record_call(replica, call)
        replica.send_call(call)

    def _place_choosy(self) -> None:
        """Send the calls that wait for certain replicas, if these have room; else ask for some."""
        for call in list(self.choosy):
            suitable = self._suitable_replicas(call)
            able = [one for one in suitable if one.has_slot_for(call)]
            if able:
                self.choosy.remove(call)
                self._send(min(able, key=lambda one: (not one.wanted, len(one.calls))), call)
            for one in suitable if not able else ():
                one.borrow()
        self._return_all_lent_slots()

    def _suitable_replicas(self, call: InflightRequest) -> list[WorkerConnection]:
        """Return the replicas of the call's generation whose context is large enough for it.

        If there are none and none is coming, smaller ones are returned: the answer then ends early
        by length, or a call that has not begun fails as too long.
        """
        alike = [one for one in self.replicas.values() if one.can_run(call)]
        large = [one for one in alike if one.info and one.info.max_context >= call.least_context]
        waits = call.continuation is not None and self._is_coming(call)
        return large if large or waits else alike

    def _is_coming(self, call: InflightRequest) -> bool:
        """Return whether a worker that may be of the call's generation is being started."""
        return any(
            one.state in COMING and _may_be(one, call.continuation) for one in self.status.replicas
        )

    def goes_on(self, call: InflightRequest) -> bool:
        """Return whether a started answer can be continued, now or soon.

        True also for a swapped-out model, whose generation is known only after it is loaded again,
        and for a hopeless model, whose calls fail elsewhere with that reason.
        """
        if self.is_permanently_down:
            return True
        if any(
            one.can_run(call) and (one.wanted or not call.alone_until) for one in self._connected
        ):
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
        """Remove and return the waiting calls whose answers cannot be continued any more."""
        waiting = (*self.suspects.order(), *self.choosy)
        begun = [call for call in waiting if call.continuation is not None]
        stranded = [call for call in begun if not self.goes_on(call)]
        for call in stranded:
            self.withdraw(call)
        return stranded

    def _try_suspect(self) -> None:
        """Send the next suspect to a worker, unless the previous one is still on trial."""
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
        """Return the replica where a suspect does the least harm; None to wait for a better one."""
        reported = {replica.socket: replica.running for replica in self.status.replicas}

        def load(replica: WorkerConnection) -> int:
            """Return the replica's calls; the supervisor reports other gateways' calls late."""
            return max(len(replica.calls), reported.get(replica.socket, 0))

        every = self._suitable_replicas(call) if call.is_choosy else self.replicas.values()
        able = [replica for replica in every if replica.has_room]
        best = min(able, key=lambda replica: (load(replica), replica.held), default=None)
        if best is None or (self._recovering and load(best)):
            return None
        waits_in_vain = call.not_before_s < self._ordinary_death_s
        return None if self._is_last(best) and not waits_in_vain else best

    def _is_last(self, replica: WorkerConnection) -> bool:
        """Return whether no other replica takes ordinary calls, but one will soon."""
        others = [one for one in self.replicas.values() if one is not replica and one.routable]
        return all(one.held for one in others) and (bool(others) or self._recovering)

    @property
    def _recovering(self) -> bool:
        """Return whether another replica, which will be empty, is on its way."""
        dialling = any(r.wanted and not r.routable for r in self.replicas.values())
        return dialling or self._coming

    def note_death(self, *, isolated: bool) -> None:
        """Record a worker's death; `isolated`: a suspect ran alone in it."""
        self._ordinary_death_s = 0.0 if isolated else time.monotonic()

    # ---- waiting calls

    def take_back(self, call: InflightRequest, *, first: bool = True) -> None:
        """Queue a call again that has lost its worker, before all calls that have not run yet.

        Among the returned suspects it becomes the first, or the last if it has had its turn.
        """
        for observer in call.observers:
            observer.on_requeued(call)
        if not call.alone_until:
            if call.is_choosy:
                self.choosy.append(call)
            else:
                self.queue.requeue(call)
        else:
            call.not_before_s = max(call.not_before_s, time.monotonic())
            self.suspects.requeue(call, first=first)

    def order(self) -> list[InflightRequest]:
        """Return all waiting calls in the order in which they will run."""
        return [*self.suspects.order(), *self.choosy, *self.queue.order()]

    def withdraw(self, call: InflightRequest) -> None:
        """Remove a waiting call."""
        if call in self.choosy:
            self.choosy.remove(call)
        elif not self.suspects.remove(call):
            self.queue.remove(call)
        self._return_all_lent_slots()

    def position(self, call: InflightRequest) -> int | None:
        """Return how many calls are ahead of this one; None once it runs."""
        return next((at for at, other in enumerate(self.order()) if other is call), None)

    def follow_position(self, call: InflightRequest) -> None:
        """Tell a call its position now and, on change, once a second; see `place_after`."""
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
        """Tell the followers their changed positions; return whether any follower is left."""
        places = {call: place for place, call in enumerate(self.order())}
        self.followers = {call for call in self.followers if call in places}
        for call in self.followers:
            if call.place != places[call]:
                call.set_position(places[call])
        return bool(self.followers)


class NamedRoute(ModelQueue):
    """The queue of `base` under another name, which `status` has; calls queue at `base`."""

    def __init__(self, base: ModelQueue, status: ModelStatus) -> None:
        super().__init__(replace(status, aliases=(), adapters=(), presets=()))
        self.base = base
        self.queue, self.suspects, self.replicas = base.queue, base.suspects, base.replicas
        self.choosy = base.choosy

    @property
    def ready(self) -> bool:
        return self.base.ready

    @property
    def is_permanently_down(self) -> bool:
        return self.base.is_permanently_down

    @property
    def available(self) -> bool:
        return self.base.available

    def check_available(self) -> None:
        """Raise ModelUnavailable unless the base is or will be ready."""
        self.base.check_available()


def _is_resident(status: ModelStatus) -> bool:
    return status.residence is None or status.residence.tier == "resident"


def _may_be(replica: ReplicaStatus, began: Continuation | None) -> bool:
    """Return whether a worker's generation, as far as it is known, matches a continuation."""
    return began is None or base_generation(began).startswith(replica.generation)


def unknown(model: str, usable: Iterable[ModelStatus]) -> ModelNotFound:
    """Return the error for an unknown model.

    It lists only names of `usable`, the models that the caller may use.
    """
    found = [*usable]
    aliases = sorted(alias for one in found for alias in one.aliases)
    known = [*sorted(one.name for one in found), *aliases]
    served = f"{', '.join(known) or 'none yet'}{did_you_mean(model, known[:_MOST_COMPARED])}"
    said = f"the model {model[:128]!r} is not served here; the models are: {served}"
    return ModelNotFound(said, param="model")


def describe(replica: ReplicaStatus) -> str:
    """Describe a replica's state in a few words, with its progress or reason."""
    progress = replica.progress
    if replica.state in ("starting", "loading") and progress is not None:
        if progress.total:
            return f"{progress.phase} {100 * progress.done // progress.total} %"
        return progress.phase
    return f"{replica.state}: {replica.reason}" if replica.reason else replica.state
