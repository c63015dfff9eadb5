"""Where each request goes: one bounded queue per model, and the replica that suits it best.

HTTP and Gradio requests come in by the same door, `open`. What waits can still be cancelled,
time out, be told its position, or go elsewhere; a worker only ever holds what it has slots for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from servekit.errors import (
    ClientClosed,
    DeadlineExceeded,
    ModelUnavailable,
    QueueFull,
    RequestError,
    WorkerLost,
)
from servekit.gateway.access import Access
from servekit.gateway.adapted import AdapterRoute, Farewells, adapters_of
from servekit.gateway.bounds import check_grammar
from servekit.gateway.call import Call
from servekit.gateway.deadlines import Deadlines
from servekit.gateway.demand import Demand
from servekit.gateway.fate import NOT_RESUMED, Fate
from servekit.gateway.measures import Measures
from servekit.gateway.pool import NEARBY, Replica
from servekit.gateway.quarantine import Quarantine, refusal
from servekit.gateway.route import Route, describe, unknown
from servekit.wire.messages import ModelStatus, Quarantined, Topology
from servekit.wire.residency import KeepAlive, Wanted

__all__ = ["Route", "Router", "describe"]

log: Any = structlog.get_logger("servekit.gateway")


class Router:
    """All models of the service, from this gateway's point of view.

    `report` is called with each request that this gateway quarantines, `unused` with each adapter
    that does not serve any more, once its last call is done, `use` with what models that come and
    go are used for.
    """

    def __init__(
        self,
        name: str,
        report: Callable[[Quarantined], None] = lambda _: None,
        unused: Callable[[str], None] = lambda _: None,
        use: Callable[[Wanted | KeepAlive], None] = lambda _: None,
    ) -> None:
        self.name, self.reach = name, NEARBY
        self.routes: dict[str, Route] = {}
        self.draining = False
        self.idle = asyncio.Event()  # set once draining and nothing is in flight
        self.requests = 0
        self.chooses = False  # some model has several replicas: it matters whose session a call is
        self.quarantine = Quarantine()
        self.access = Access()
        self.measures = Measures()
        self._report = report
        self._names: dict[str, Route] = {}  # aliases included
        self._loop = asyncio.get_running_loop()
        self._open: set[Call] = set()
        self._deadlines = Deadlines(self._open, self._expire)
        self._farewells = Farewells(self._open, unused)
        self.demand = Demand(use)

    # ---- for the doors: HTTP and Gradio

    @property
    def in_flight(self) -> int:
        """Calls that wait or run."""
        return len(self._open)

    def find(self, model: str) -> Route:
        """The route of a model's name, its alias, or an adapter; raises ModelNotFound."""
        route = self._names.get(model)
        if route is None:
            if not model and len(self.routes) == 1:
                return next(iter(self.routes.values()))
            raise unknown(model, [one.status for one in self.models()])
        return route

    def serves(self, model: str) -> bool:
        """Whether this is the name or alias of a model, or the name of an adapter."""
        return model in self._names

    def models(self) -> Iterator[Route]:
        """What the caller of this moment may use: the models, and the adapters that can serve."""
        for route in self.routes.values():
            name = route.status.name
            if self.access.may_use(name):
                yield route
            for one in route.adapters:
                if (one.ready or one.available) and self.access.may_use(one.status.name, name):
                    yield one

    def open(self, call: Call, timeout_s: float | None = None) -> Call:
        """Queue a call and run it as soon as there is room.

        Raises ModelNotFound, Forbidden, RateLimited, ModelUnavailable, QueueFull or
        RequestQuarantined at once; later failures reach the call's consumer. `timeout_s` is capped
        by the model's own.
        """
        try:
            route = self._take(call)
        except RequestError as error:
            self.measures.refused(self, call, error)
            raise
        self._begin(route, call)
        limit_s = route.status.timeout_s
        call.limit_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        self._deadlines.keep(call)
        replica = None if len(route.queue) else route.best(call)
        if replica is not None:
            replica.run(call)
        else:
            route.queue.push(call, call.key, call.priority, call.created_s)
            if route.on_wait is not None:
                route.on_wait(route)
        return call

    def _take(self, call: Call) -> Route:
        """The model's own route, which takes the call."""
        route = (asked := self.find(call.model)).base
        if call.params.grammar is not None:
            check_grammar(call.params.grammar, self.access.rules.limits)
        if self.access.watchful:
            adapter = "" if asked is route else asked.status.name
            self.access.admit(call, route.status.name, adapter)
        if isinstance(asked, AdapterRoute):
            asked.adapt(call)
        self._admit(route, call)
        return route

    def _admit(self, route: Route, call: Call) -> None:
        if self.draining:
            raise ModelUnavailable("servekit is shutting down", retry_after_s=5.0)
        route.check_available()
        if (error := self.quarantine.error(route.status.name, call, time.time())) is not None:
            raise error
        if route.queue.full:
            self._make_room(route, call)

    def _make_room(self, route: Route, call: Call) -> None:
        """Raise QueueFull; to the key that waits most where that is not the caller's."""
        error = QueueFull(
            f"{len(route.queue)} requests wait for {route.status.name!r} already; try later",
            retry_after_s=route.pace.wait_s(len(route.queue), self._loop.time()),
        )
        crowded = route.queue.crowd_out(call.key)
        if crowded is None:
            raise error
        self._fail(crowded, error)

    def drain(self) -> None:
        """Take nothing new; `idle` is set when what is in flight is done."""
        self.draining = True
        if not self._open:
            self.idle.set()

    def cut(self) -> None:
        """The time to finish is over: say so to all that is in flight."""
        said = "servekit has shut down before this was done; ask again when it is back"
        for call in list(self._open):
            self._withdraw(call)
            call.fail(ModelUnavailable(said, retry_after_s=5.0))

    def position(self, call: Call) -> int | None:
        """How many calls are before this one in its queue; None once it runs."""
        return None if call.route is None else call.route.position(call)

    def follow(self, call: Call) -> None:
        """Have the call told its place now and, on change, once a second; see `place_after`."""
        if call.route is not None:
            call.route.follow(call)

    # ---- from the supervisor

    def apply(self, topology: Topology) -> None:
        """Make the routes what the supervisor says they are."""
        if topology.draining:
            self.drain()
        self.quarantine.add(topology.quarantined, time.time())
        self.access.apply(topology.access)
        for status in topology.models:
            route = self.routes.setdefault(status.name, Route(status))
            route.set_status(status)
            route.adapters = adapters_of(route)
            self._apply_replicas(route, status, topology.gateways)
        for name in self.routes.keys() - {status.name for status in topology.models}:
            self._remove(self.routes.pop(name))
        self._names = {
            alias: one
            for route in self.routes.values()
            for one in (route, *route.adapters)
            for alias in (one.status.name, *one.status.aliases)
        }
        self.chooses = any(len(status.replicas) > 1 for status in topology.models)
        self._farewells.apply(topology.models)
        self.demand.apply(self.routes.values())

    def _apply_replicas(self, route: Route, status: ModelStatus, gateways: int) -> None:
        ready = {replica.socket: replica for replica in status.replicas if replica.state == "ready"}
        for socket in route.replicas.keys() - ready.keys():
            replica = route.replicas[socket]
            replica.retire()
            if not replica.calls:
                del route.replicas[socket]
        for socket, replica_status in ready.items():
            known = route.replicas.get(socket)
            if known is None or not (known.wanted or known.reinstate()):
                route.replicas[socket] = Replica(self, status.name, replica_status, gateways)
            route.replicas[socket].set_share(gateways)
        if route.hopeless:
            self._fail_waiting(route)
        route.dispatch_all()

    def _remove(self, route: Route) -> None:
        route.removed = True
        for replica in route.replicas.values():
            replica.retire()
        self._fail_waiting(route)

    def _fail_waiting(self, route: Route) -> None:
        """Nothing will come to serve these: say so now rather than at their deadlines."""
        for call in route.order():
            route.withdraw(call)
            self._fail(call, route.unavailable())

    # ---- from the replicas

    def on_free(self, replica: Replica) -> None:
        """A replica has room: give it what waits."""
        if (route := self.routes.get(replica.model)) is not None:
            route.was_ready = True
            route.dispatch(replica)

    def on_lost(self, replica: Replica, calls: list[Call]) -> None:
        """A worker died: what it was doing is done elsewhere, before all that waits."""
        for call in calls:
            ran = replica.ran(call)
            decided = call.died(ran)
            if not self._resumable(replica, call):
                continue
            assert call.route is not None
            if decided is Fate.QUARANTINE:
                self._quarantine(call.route, call)
            else:
                call.route.take_back(call, first=not ran)
        self._reroute(replica)

    def on_returned(self, replica: Replica, call: Call) -> None:
        """A worker is draining and did not take a call: nothing is wrong with the call."""
        if self._resumable(replica, call):
            assert call.route is not None
            call.route.take_back(call)
        self._reroute(replica)

    def _resumable(self, replica: Replica, call: Call) -> bool:
        """Whether a call can run again; if not it has been told why."""
        assert call.route is not None
        if call.route.removed:
            self._fail(call, WorkerLost("its worker ended, and the model is no longer served"))
        elif not replica.resumes and not call.rewind():
            self._fail(call, WorkerLost(NOT_RESUMED))
        elif error := self.quarantine.error(call.route.status.name, call, time.time()):
            self._fail(call, error)
        return not call.done

    def _reroute(self, lost: Replica) -> None:
        route = self.routes.get(lost.model)
        if route is None:
            return
        if not lost.wanted and not lost.calls and route.replicas.get(lost.socket) is lost:
            del route.replicas[lost.socket]
        route.dispatch_all()
        if route.hopeless:
            self._fail_waiting(route)

    def on_ended(self, call: Call) -> None:
        """The call's worker has answered it, well or not."""
        self._end(call)
        if call.route is not None:
            call.route.pace.completed(self._loop.time())

    def _quarantine(self, route: Route, call: Call) -> None:
        """Give a call up for what it does to workers, and all that waits and is the same."""
        now = time.time()
        entry = self.quarantine.commit(route.status, call, now)
        self._fail(call, refusal(entry, now))
        if entry.until <= now:
            return
        self._report(entry)
        for other in route.order():
            if other.same_as(call):
                route.withdraw(other)
                self._fail(other, refusal(entry, now))

    # ---- ends

    def _cancel(self, call: Call) -> None:
        self._withdraw(call)
        call.fail(ClientClosed("the request was cancelled"))

    def _expire(self, call: Call) -> None:
        where = "waiting for a worker" if call.replica is None else "running"
        self._withdraw(call)
        call.fail(DeadlineExceeded(f"not done within {call.limit_s:g} s; it was {where}"))

    def _withdraw(self, call: Call) -> None:
        """Take a call out of the queue, or off its worker."""
        self._end(call)
        replica = call.replica
        if replica is not None:
            replica.drop(call)
            self.on_free(replica)
        elif call.route is not None:
            call.route.withdraw(call)

    def _fail(self, call: Call, error: RequestError) -> None:
        self._end(call)
        call.fail(error)

    def _begin(self, route: Route, call: Call) -> None:
        self.requests += 1
        self._open.add(call)
        call.route = route
        call.on_cancel = self._cancel
        call.meter = self.measures.meter(route, call)
        if call.caller is not None:
            call.caller.begin()
        if not route.in_flight:
            route.pace.resume(self._loop.time())
        route.in_flight += 1

    def _end(self, call: Call) -> None:
        self._open.remove(call)
        if call.route is not None:
            call.route.left(call)
        if self.draining and not self._open:
            self.idle.set()
