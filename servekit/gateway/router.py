"""Where each request goes: one bounded queue per model, and the replica with the most room.

HTTP and Gradio requests come in by the same door, `open`. What waits can still be cancelled,
time out, be told its position, or go elsewhere; a worker only ever holds what it has slots for.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from servekit.errors import (
    ClientClosed,
    DeadlineExceeded,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    WorkerLost,
)
from servekit.gateway.call import Call
from servekit.gateway.pool import Replica
from servekit.gateway.queue import FairQueue
from servekit.wire.messages import ModelStatus, ReplicaStatus, Topology

log: Any = structlog.get_logger("servekit.gateway")

#: A call whose workers died this often is given up: it may be what kills them.
MAX_ATTEMPTS = 3
#: States in which a worker will, in all likelihood, serve soon.
COMING = ("starting", "loading", "backoff")


class Route:
    """One model: its status, its queue and its replicas."""

    def __init__(self, status: ModelStatus) -> None:
        self.status = status
        self.queue: FairQueue[Call] = FairQueue(status.max_queue)
        self.replicas: dict[str, Replica] = {}  # by socket: a new incarnation is a new replica
        self.was_ready = False

    @property
    def ready(self) -> bool:
        """A request sent now can complete."""
        return any(replica.routable for replica in self.replicas.values())

    @property
    def running(self) -> int:
        return sum(len(replica.calls) for replica in self.replicas.values())

    @property
    def hopeless(self) -> bool:
        """No worker serves, and none will."""
        return not any(replica.state in (*COMING, "ready") for replica in self.status.replicas)

    def best(self) -> Replica | None:
        """The replica with the most room, or None if all are full. Ties go to the first."""
        best, room = None, 0
        for replica in self.replicas.values():
            if replica.credits > room:
                best, room = replica, replica.credits
        return best

    def check_available(self) -> None:
        """Raise ModelUnavailable unless the model serves, or did and will soon again."""
        if self.ready:
            return
        states: set[str] = {replica.state for replica in self.status.replicas}
        if self.was_ready and states & {*COMING, "ready"}:
            return  # its worker is being replaced: the request waits for that
        raise ModelUnavailable(self._why(states), retry_after_s=5.0, param="model")

    def _why(self, states: set[str]) -> str:
        name = self.status.name
        if states & {*COMING, "ready"}:
            return f"the model {name!r} is not ready yet: {self._progress()}"
        reasons = [replica.reason for replica in self.status.replicas if replica.reason]
        return f"the model {name!r} cannot serve: {reasons[0] if reasons else 'it is stopped'}"

    def _progress(self) -> str:
        return "; ".join(sorted({describe(replica) for replica in self.status.replicas}))


class Router:
    """All models of the service, from this gateway's point of view."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.routes: dict[str, Route] = {}
        self.draining = False
        self.idle = asyncio.Event()  # set once draining and nothing is in flight
        self.requests = 0
        self._names: dict[str, Route] = {}  # aliases included
        self._loop = asyncio.get_running_loop()
        self._open: set[Call] = set()

    # ---- for the doors: HTTP and Gradio

    @property
    def in_flight(self) -> int:
        """Calls that wait or run."""
        return len(self._open)

    def find(self, model: str) -> Route:
        """The route of a model name or alias; raises ModelNotFound."""
        route = self._names.get(model)
        if route is None and not model and len(self.routes) == 1:
            return next(iter(self.routes.values()))
        if route is None:
            known = ", ".join(sorted(self.routes)) or "none yet"
            raise ModelNotFound(
                f"the model {model!r} is not served here; served are: {known}", param="model"
            )
        return route

    def open(self, call: Call, timeout_s: float | None = None) -> Call:
        """Queue a call and run it as soon as there is room.

        Raises ModelNotFound, ModelUnavailable or QueueFull at once; later failures reach the
        call's consumer. `timeout_s` is capped by the model's own.
        """
        route = self.find(call.model)
        self._admit(route)
        self.requests += 1
        self._open.add(call)
        call.on_cancel = self._cancel
        limit_s = route.status.timeout_s
        limit_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        call.timer = self._loop.call_later(limit_s, self._expire, call, limit_s)
        replica = None if len(route.queue) else route.best()
        if replica is not None:
            replica.run(call)
        else:
            route.queue.push(call, call.key, call.priority)
        return call

    def _admit(self, route: Route) -> None:
        if self.draining:
            raise ModelUnavailable("servekit is shutting down", retry_after_s=5.0)
        route.check_available()
        if route.queue.full:
            raise QueueFull(
                f"{len(route.queue)} requests wait for {route.status.name!r} already; try later",
                retry_after_s=1.0,
            )

    def drain(self) -> None:
        """Take nothing new; `idle` is set when what is in flight is done."""
        self.draining = True
        if not self._open:
            self.idle.set()

    def position(self, call: Call) -> int | None:
        """How many calls are before this one in its queue; None once it runs."""
        return self.find(call.model).queue.position(call)

    # ---- from the supervisor

    def apply(self, topology: Topology) -> None:
        """Make the routes what the supervisor says they are."""
        if topology.draining:
            self.drain()
        for status in topology.models:
            route = self.routes.setdefault(status.name, Route(status))
            route.status = status
            self._apply_replicas(route, status, topology.gateways)
        for name in self.routes.keys() - {status.name for status in topology.models}:
            self._remove(self.routes.pop(name))
        self._names = {
            alias: route
            for route in self.routes.values()
            for alias in (route.status.name, *route.status.aliases)
        }

    def _apply_replicas(self, route: Route, status: ModelStatus, gateways: int) -> None:
        ready = {replica.socket: replica for replica in status.replicas if replica.state == "ready"}
        for socket in route.replicas.keys() - ready.keys():
            replica = route.replicas[socket]
            replica.retire()
            if not replica.calls:
                del route.replicas[socket]
        for socket, replica_status in ready.items():
            if socket not in route.replicas:
                route.replicas[socket] = Replica(self, status.name, replica_status, gateways)
        if route.hopeless:
            self._fail_waiting(route)

    def _remove(self, route: Route) -> None:
        for replica in route.replicas.values():
            replica.retire()
        self._fail_waiting(route)

    def _fail_waiting(self, route: Route) -> None:
        """Nothing will come to serve these: say so now rather than at their deadlines."""
        while len(route.queue):
            call = route.queue.pop()
            self._end(call)
            call.fail(ModelUnavailable(route._why(set()), retry_after_s=30.0, param="model"))

    # ---- from the replicas

    def on_free(self, replica: Replica) -> None:
        """A replica has room: give it what waits."""
        route = self.routes.get(replica.model)
        if route is None:
            return
        route.was_ready = True
        while len(route.queue) and replica.credits > 0:
            replica.run(route.queue.pop())

    def on_lost(self, replica: Replica, calls: list[Call]) -> None:
        """A worker died: what it was doing is done elsewhere, before all that waits."""
        route = self.routes.get(replica.model)
        for call in calls:
            call.attempts += 1
            if route is None or call.attempts > MAX_ATTEMPTS:
                self._end(call)
                call.fail(WorkerLost(f"{call.attempts} workers died while they ran this request"))
            else:
                log.info("rerouting", attempt=call.attempts, emitted=len(call.emitted))
                route.queue.give_back(call)
        if route is not None:
            self._reroute(route, replica)

    def _reroute(self, route: Route, lost: Replica) -> None:
        if not lost.wanted and not lost.calls:
            route.replicas.pop(lost.socket, None)
        for other in route.replicas.values():
            if other.routable:
                self.on_free(other)
        if route.hopeless:
            self._fail_waiting(route)

    def on_ended(self, call: Call) -> None:
        """The call's worker has answered it, well or not."""
        self._end(call)

    # ---- ends

    def _cancel(self, call: Call) -> None:
        self._withdraw(call)
        call.fail(ClientClosed("the request was cancelled"))

    def _expire(self, call: Call, limit_s: float) -> None:
        where = "waiting for a worker" if call.replica is None else "running"
        self._withdraw(call)
        call.fail(DeadlineExceeded(f"not done within {limit_s:g} s; it was {where}"))

    def _withdraw(self, call: Call) -> None:
        """Take a call out of the queue, or off its worker."""
        self._end(call)
        replica = call.replica
        if replica is not None:
            replica.drop(call)
            self.on_free(replica)
        elif (route := self._names.get(call.model)) is not None:
            route.queue.remove(call)

    def _end(self, call: Call) -> None:
        self._open.discard(call)
        if self.draining and not self._open:
            self.idle.set()
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None


def describe(replica: ReplicaStatus) -> str:
    """A replica's state in a few words, with its progress or its reason."""
    progress = replica.progress
    if replica.state == "loading" and progress is not None:
        if progress.total:
            return f"{progress.phase} {100 * progress.done // progress.total} %"
        return progress.phase
    return f"{replica.state}: {replica.reason}" if replica.reason else replica.state
