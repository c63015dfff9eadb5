"""The router: one bounded queue per model, and the choice of a replica for each request.

HTTP and Gradio requests both enter by `Router.queue_call`. A waiting request can be cancelled, time
out, learn its position, or go to any replica; a worker only gets as many requests as it has slots.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from servekit.errors import (
    ClientClosed,
    DeadlineExceeded,
    ModelChanged,
    ModelUnavailable,
    QueueFull,
    RequestError,
    RequestQuarantined,
    ServekitError,
    SourceQuarantined,
    WorkerLost,
)
from servekit.gateway.auth.authorization import Access
from servekit.gateway.demand_reporter import DemandReporter
from servekit.gateway.http.request_context import BATCHED, INCOMPLETE
from servekit.gateway.http.request_limits import check_fits, check_grammar, held_bytes
from servekit.gateway.routing.adapter_route import (
    AdapterRoute,
    AdapterUsageTracker,
    adapters_of,
    base_of,
)
from servekit.gateway.routing.failures.quarantine import Quarantine, fingerprint, is_source, refusal
from servekit.gateway.routing.failures.retry_policy import (
    ALONE_AT,
    CHANGED,
    NOT_RESUMED,
    RetryDecision,
)
from servekit.gateway.routing.failures.suspect_sources import (
    Sources,
    Suspect,
    Verdict,
    is_shared,
    source_of,
)
from servekit.gateway.routing.fair_queue import FairQueue, Leavers, choose_leavers
from servekit.gateway.routing.model_queue import ModelQueue, describe, unknown
from servekit.gateway.routing.preset_route import presets_of
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.step_delivery import EndOfTick
from servekit.gateway.routing.task_check import check_fetched, check_media, check_task
from servekit.gateway.routing.timeouts import GRAIN_S, Deadlines
from servekit.gateway.routing.worker_connection import NEARBY, WorkerConnection
from servekit.gateway.telemetry.metrics import RequestMetrics
from servekit.protocol.messages import Media, ModelStatus, Quarantined, SourceReport, Topology
from servekit.protocol.residency import KeepAlive, ModelDemand

__all__ = ["ModelQueue", "Router", "describe"]

log: Any = structlog.get_logger("servekit.gateway")

#: Priority of the requests of batches: hours of waiting behind any that a client can ask for.
_LAST = 1000


@dataclass(eq=False, slots=True)
class IncompleteRequest:
    """A request that has no calls yet."""

    size_bytes: int
    fail: Callable[[ServekitError], None]


class Router:
    """The models of the service, as this gateway knows them.

    `report` is called with each request that this gateway quarantines and with its news of suspect
    sources, `unused` with each adapter that has left service, once its last call is done, `use`
    with the demand for swappable models.
    """

    def __init__(
        self,
        name: str,
        report: Callable[[Quarantined | SourceReport], None] = lambda _: None,
        unused: Callable[[str], None] = lambda _: None,
        use: Callable[[ModelDemand | KeepAlive], None] = lambda _: None,
    ) -> None:
        self.name, self.reach = name, NEARBY
        self.routes: dict[str, ModelQueue] = {}
        self.draining = False
        self.idle = asyncio.Event()  # set while draining once no call is in flight
        self.requests = 0
        self.chooses = False  # some model has several replicas, so that sessions matter
        self.has_unknown = False  # some model's properties are not known before its first load
        self.quarantine = Quarantine()
        self.sources = Sources(lambda: self._loop.call_soon(self._tell_others))
        #: Called after each topology, and about once a second while there are requests.
        self.listeners: list[Callable[[], None]] = []
        self.access = Access()
        self.measures = RequestMetrics()
        self._report = report
        self._names: dict[str, ModelQueue] = {}  # aliases included
        self._loop = asyncio.get_running_loop()
        self.end_of_tick = EndOfTick()
        self._open: set[InflightRequest] = set()
        self._incomplete: set[IncompleteRequest] = set()
        self._deadlines = Deadlines(self._open, self._expire)
        self._farewells = AdapterUsageTracker(self._open, unused)
        self.demand = DemandReporter(use)

    # ---- for HTTP and Gradio

    @property
    def in_flight(self) -> int:
        """Return the number of calls that wait or run."""
        return len(self._open)

    def find(self, model: str) -> ModelQueue:
        """Return the queue of a model, preset or adapter by name; by default for "".

        Raises ModelNotFound.
        """
        route = self._names.get(model)
        if route is None:
            if not model and self.routes:
                return self._default()
            raise unknown(model, [one.status for one in self.models()])
        return route

    def _default(self) -> ModelQueue:
        """Return the queue for requests that name no model: `default_model`, else the first model.

        Models that the caller may not use, or the profile leaves out, are skipped. If none is left,
        the first choice is returned, so that the refusal names it.
        """
        first = self._names.get(self.access.rules.default_model) or next(iter(self.routes.values()))
        if not first.status.left_out and self.access.may_use(first.status.name, base_of(first)):
            return first
        return next(self.models(), first)

    def serves(self, model: str) -> bool:
        """Return whether this is the name or alias of a model, or of a preset or adapter."""
        return model in self._names

    def models(self) -> Iterator[ModelQueue]:
        """Yield the models, presets and available adapters that the current caller may use.

        Those that the profile in force leaves out are not among them.
        """
        for route in self.routes.values():
            if route.status.left_out:
                continue
            name = route.status.name
            if self.access.may_use(name):
                yield route
            for preset in route.presets:
                if self.access.may_use(preset.status.name, name):
                    yield preset
            for one in route.adapters:
                if (one.ready or one.available) and self.access.may_use(one.status.name, name):
                    yield one

    def queue_call(self, call: InflightRequest, timeout_s: float | None = None) -> InflightRequest:
        """Queue a call and run it as soon as there is room.

        Raises ModelNotFound, Forbidden, RateLimited, ModelUnavailable, QueueFull or
        RequestQuarantined at once; later failures reach the call's consumer. `timeout_s` is capped
        by the model's own timeout.
        """
        size_bytes = 0
        try:
            asked = self._admit_call(call)
            route = asked.base
            waits = call.alone_until or route.queue.size
            replica = None if waits else route.best(call)
            if replica is None:
                check_fits(call, route.status.info)
                queue = route.suspects if call.alone_until else route.queue
                size_bytes = held_bytes(call)
                # last of all: other calls may have to leave for this one
                self._make_room(route, queue, call, size_bytes)
        except RequestError as error:
            self.measures.count_refusal(self, call, error)
            raise
        self._begin(asked, call)
        limit_s = route.status.timeout_s
        call.limit_s = limit_s if timeout_s is None else min(timeout_s, limit_s)
        self._deadlines.watch(call)
        if call.alone_until:
            self._line_up(route, call, size_bytes)
            return call
        if replica is not None:
            replica.send_call(call)
        else:
            route.queue.push(call, call.key, call.priority, call.created_s, size_bytes)
            if not waits:  # else they are asked for already
                route.borrow()
            if route.on_wait is not None:
                route.on_wait(route)
        return call

    def _admit_call(self, call: InflightRequest) -> ModelQueue:
        """Admit a call, and return the queue of the model, preset or adapter that it names."""
        route = (asked := self.find(call.model)).base
        if call.params.grammar is not None:
            check_grammar(call.params.grammar, self.access.rules.limits)
        if self.access.watchful:
            adapter = "" if asked is route else asked.status.name
            self.access.admit_call(call, route.status.name, adapter)
        if BATCHED.get():
            call.priority = _LAST
        check_task(asked, call, self.models)
        for message in call.messages or ():
            if message.media:
                media = [one for each in call.messages or () for one in each.media]
                self.check_media(asked, media)
                check_fetched(media)
                break
        if isinstance(asked, AdapterRoute):
            asked.adapt(call)
        self._admit(route, call)
        return asked

    def hold_incomplete(self, request: IncompleteRequest) -> None:
        """Count a request that waits for its images, an earlier response or a first load, or whose
        answer is to be stored.

        Its calls are taken if the gateway begins to drain meanwhile. Raises ModelUnavailable if it
        drains already, and QueueFull if such requests hold too many bytes.
        """
        self._check_draining()
        limit_bytes = self.access.rules.max_queue_bytes
        if sum(one.size_bytes for one in self._incomplete) + request.size_bytes > limit_bytes:
            said = f"requests that are not complete hold {limit_bytes // 2**20} MiB already"
            raise QueueFull(f"{said}; try later", retry_after_s=1.0)
        self._incomplete.add(request)

    def release_incomplete(self, request: IncompleteRequest) -> None:
        """Count a request of `hold_incomplete` no longer."""
        self._incomplete.remove(request)
        self._note_idle()

    def check_media(self, route: ModelQueue, media: Sequence[Media]) -> None:
        """Raise RequestError for media that the model, or `server.limits`, does not take."""
        check_media(route, media, self.access.rules.limits.images, self.models)

    def _admit(self, route: ModelQueue, call: InflightRequest) -> None:
        if self.draining and not INCOMPLETE.get():
            self._check_draining()
        route.check_available()
        now_s = call.created_s
        held = self.quarantine.held
        if held and (error := self.quarantine.error(route.status, call, now_s)) is not None:
            raise error
        if self.sources.deaths and self.sources.has_suspects(now_s):
            self._judge(route, call)

    def _check_draining(self) -> None:
        if self.draining:
            raise ModelUnavailable("servekit is shutting down", retry_after_s=5.0)

    def _make_room(
        self,
        route: ModelQueue,
        queue: FairQueue[InflightRequest],
        call: InflightRequest,
        size_bytes: int,
    ) -> None:
        """Raise QueueFull, or fail the calls of others that have to leave for this one."""
        most_bytes = self.access.rules.max_queue_bytes
        said = f"requests that wait hold {most_bytes // 2**20} MiB already; try later"
        leavers: Leavers[InflightRequest] = []
        if self._queued_bytes() + size_bytes > most_bytes:
            queues = [one for each in self.routes.values() for one in (each.queue, each.suspects)]
            lacking_bytes = self._queued_bytes() + size_bytes - most_bytes
            leavers = choose_leavers(queues, call.key, size_bytes, lacking_bytes)
            if not leavers:
                self._refuse_full(route, said, None)
        if queue.full and not any(one is queue for one, _ in leavers):
            full = f"{len(queue)} requests wait for {route.status.name!r} already; try later"
            self._refuse_full(route, full, queue.crowd_out(call.key))
        for held, leaver in leavers:
            if self._queued_bytes() + size_bytes > most_bytes:
                held.remove(leaver)
                self._refuse_full(route, said, leaver)

    def _queued_bytes(self) -> int:
        """Return the memory of the waiting calls of all models, in bytes."""
        held_bytes = 0
        for route in self.routes.values():
            held_bytes += route.queue.size_bytes + route.suspects.size_bytes
        return held_bytes

    def _refuse_full(self, route: ModelQueue, said: str, instead: InflightRequest | None) -> None:
        """Raise QueueFull, or fail the call that leaves `instead` with it."""
        waiting = len(route.queue) + len(route.suspects)
        wait_s = route.pace.wait_s(waiting + (instead is not None), self._loop.time())
        if instead is None:  # an unnamed error: its frame must not keep it and the body alive
            raise QueueFull(said, retry_after_s=wait_s)
        self._fail(instead, QueueFull(said, retry_after_s=wait_s))

    def drain(self) -> None:
        """Refuse new calls; `idle` is set when all calls in flight are done."""
        self.draining = True
        self._note_idle()

    def _note_idle(self) -> None:
        if self.draining and not self._open and not self._incomplete:
            self.idle.set()

    def fail_all(self) -> bool:
        """Fail all calls in flight, as the time to drain is over; return whether there were any."""
        said = "servekit shut down before this was done; send the request again when it is back"
        for call in (calls := list(self._open)):
            self._withdraw(call)
            call.fail(ModelUnavailable(said, retry_after_s=5.0))
        for request in (held := list(self._incomplete)):
            request.fail(ModelUnavailable(said, retry_after_s=5.0))
        return bool(calls or held)

    def position(self, call: InflightRequest) -> int | None:
        """Return how many calls are ahead of this one in its queue; None once it runs."""
        return None if call.route is None else call.route.position(call)

    def follow_position(self, call: InflightRequest) -> None:
        """Tell a call its position now and, on change, once a second; see `place_after`."""
        if call.route is not None:
            call.route.follow_position(call)

    # ---- from the supervisor

    def apply_topology(self, topology: Topology) -> None:
        """Apply the supervisor's topology: models, replicas, access rules, quarantine."""
        if topology.draining:
            self.drain()
        refused = self.quarantine.adopt_entries(topology.quarantined, time.monotonic())
        self.sources.has_peers = topology.gateways > 1
        self.access.apply_rules(topology.access)
        for status in topology.models:
            route = self.routes.pop(status.name, None) or ModelQueue(status)
            self.routes[status.name] = route  # keeps the order of the configuration file
            route.set_status(status)
            route.adapters, route.presets = adapters_of(route), presets_of(route)
            self._apply_replicas(route, status, topology.gateways)
        for name in self.routes.keys() - {status.name for status in topology.models}:
            self._remove(self.routes.pop(name))
        self._names = {
            alias: one
            for route in self.routes.values()
            for one in (route, *route.adapters, *route.presets)
            for alias in (one.status.name, *one.status.aliases)
        }
        self.chooses = any(len(status.replicas) > 1 for status in topology.models)
        self.has_unknown = any(
            status.info is None and status.residence is not None for status in topology.models
        )
        if any(map(is_source, refused)):
            self._refuse_waiting()
        self._farewells.apply_models(topology.models)
        self.demand.watch_models(self.routes.values())
        self.tell_listeners()

    def tell_listeners(self) -> None:
        for listener in self.listeners:
            listener()

    def _apply_replicas(self, route: ModelQueue, status: ModelStatus, gateways: int) -> None:
        ready = {replica.socket: replica for replica in status.replicas if replica.state == "ready"}
        for socket in route.replicas.keys() - ready.keys():
            replica = route.replicas[socket]
            replica.retire()
            if not replica.calls:
                del route.replicas[socket]
        for socket, replica_status in ready.items():
            known = route.replicas.get(socket)
            if known is None or not (known.wanted or known.undo_retire()):
                route.replicas[socket] = WorkerConnection(
                    self, status.name, replica_status, gateways
                )
            route.replicas[socket].set_share(gateways)
        if route.is_permanently_down:
            self._fail_waiting(route)
        self._release_stranded(route)
        route.dispatch_all()

    def _remove(self, route: ModelQueue) -> None:
        route.removed = True
        for replica in route.replicas.values():
            replica.retire()
        self._fail_waiting(route)

    def _fail_waiting(self, route: ModelQueue) -> None:
        """Fail all waiting calls at once, not at their deadlines: no worker will serve them."""
        for call in route.order():
            route.withdraw(call)
            self._fail(call, route.unavailable())

    # ---- from the replicas

    def on_free(self, replica: WorkerConnection) -> None:
        """Send waiting calls to a replica that has room."""
        if (route := self.routes.get(replica.model)) is not None:
            route.was_ready = True
            route.dispatch(replica)

    def on_lost(self, replica: WorkerConnection, calls: list[InflightRequest]) -> None:
        """Retry a dead worker's calls elsewhere, before all waiting calls, or quarantine them."""
        running = {call: replica.was_running(call) for call in calls}
        sources = self._suspect(replica, calls)
        route = self.routes.get(replica.model)
        if route is not None and (calls or replica.wanted):
            route.note_death(isolated=replica.alone is not None)
        for call, ran in running.items():
            decided = call.died(ran)
            if not self._resumable(replica, call):
                continue
            assert call.route is not None
            if decided is RetryDecision.QUARANTINE:
                self._quarantine(call.route, call)
            else:
                if ran and call.alone_until:
                    self._pause(call.route, call)
                call.route.take_back(call, first=not ran)
        if route is not None:
            for source in sources:
                self._note_running(source)
                self._judge_source(route, source)
        self._reroute(replica)

    def on_returned(self, replica: WorkerConnection, call: InflightRequest) -> None:
        """Queue a call again that a worker gave back, which says nothing against the call."""
        if self._resumable(replica, call):
            assert call.route is not None
            call.route.take_back(call)
        self._reroute(replica)

    def _resumable(self, replica: WorkerConnection, call: InflightRequest) -> bool:
        """Return whether a call can run again; if not, fail it."""
        assert call.route is not None
        if call.route.removed:
            self._fail(call, WorkerLost("its worker ended, and the model is no longer served"))
            return False
        error = self._not_resumed(replica, call)
        if error is None or call.rewind():
            error = self.quarantine.error(call.route.status, call, time.monotonic())
        if error is not None:
            self._fail(call, error)
        return not call.done

    def _not_resumed(self, replica: WorkerConnection, call: InflightRequest) -> RequestError | None:
        """Return the error if no worker can continue a call's answer; None if one can."""
        if not call.repeats or (not replica.resumes and call.continuation is None):
            return WorkerLost(NOT_RESUMED)
        assert call.route is not None
        if call.continuation is None or call.route.goes_on(call):
            return None
        return ModelChanged(CHANGED)

    def on_changed(self, replica: WorkerConnection, call: InflightRequest) -> None:
        """Restart a call whose worker has another generation; fail it if its client has tokens."""
        assert call.route is not None
        if call.rewind():
            call.route.take_back(call)
            self._reroute(replica)
        else:
            self._fail(call, ModelChanged(CHANGED))

    def has_larger(self, replica: WorkerConnection, call: InflightRequest) -> bool:
        """Return whether a call that is too long for one replica may fit another.

        If so, only replicas with a larger context will get it.
        """
        if replica.info is None or call.route is None or call.continuation is not None:
            return False
        least = replica.info.max_context + 1
        others = [one.info for one in call.route.replicas.values() if one.routable and one.info]
        if not any(info.max_context >= least for info in others):
            return False
        call.least_context = least
        return True

    def _reroute(self, lost: WorkerConnection) -> None:
        route = self.routes.get(lost.model)
        if route is None:
            return
        if not lost.wanted and not lost.calls and route.replicas.get(lost.socket) is lost:
            del route.replicas[lost.socket]
        self._release_stranded(route)
        route.dispatch_all()
        if route.is_permanently_down:
            self._fail_waiting(route)

    def _release_stranded(self, route: ModelQueue) -> None:
        """Restart calls that no worker can continue; fail those whose client has seen tokens."""
        for call in route.take_stranded():
            if call.rewind():
                route.take_back(call)
            else:
                self._fail(call, ModelChanged(CHANGED))

    def on_ended(self, call: InflightRequest) -> None:
        """Finish a call that its worker has answered, with success or failure."""
        self._end(call, harmless=True)
        if call.route is not None:
            call.route.pace.completed(self._loop.time())

    def _quarantine(self, route: ModelQueue, call: InflightRequest) -> None:
        """Quarantine a call that kills workers, and fail it with all equal waiting calls."""
        entry = self.quarantine.commit(route.status, call, time.monotonic())
        self._fail(call, refusal(entry, entry.for_s))
        if entry.for_s <= 0:
            return
        self._report(entry)
        for other in route.order():
            error = refusal(entry, entry.for_s) if other.same_as(call) else None
            if error is None and other.alone_until:
                error = self.quarantine.error(route.status, other, time.monotonic())
            if error is not None:
                route.withdraw(other)
                self._fail(other, error)

    # ---- sources of requests that kill workers: see `suspect_sources`

    def _suspect(self, replica: WorkerConnection, calls: list[InflightRequest]) -> set[str]:
        """Record a death against the unproven calls that were running, and return their sources."""
        cancelled = replica.take_cancelled()
        suspects: list[Suspect] = []
        sources: set[str] = set()
        sure = replica.alone is not None and replica.alone > 0
        for call in (*calls, *cancelled):
            if call.proven:
                self._clear(call)
            elif replica.was_running(call) or (call.done and replica.alone is None):
                if call.suspect is None:
                    marks = source_of(call), fingerprint(replica.model, call)
                    call.suspect = Suspect(tuple(filter(None, marks)))
                suspects.append(call.suspect)
                sources.add(source_of(call))
        self.sources.add_death(suspects, sure, time.monotonic(), replica.socket)
        for call in cancelled:
            self._charge(call)
        return sources - {""}

    def _clear(self, call: InflightRequest) -> None:
        if self.quarantine.held and call.route is not None:
            self.quarantine.clear_likeness(call.route.status.name, call)
        if call.suspect is not None:
            self.sources.clear_suspect(call.suspect)
            call.suspect = None
        if self.sources.deaths:
            self.sources.pass_through(source_of(call), alone=bool(call.alone_until))

    def _charge(self, call: InflightRequest) -> None:
        if call.suspect is not None:
            self.sources.charge_suspect(call.suspect)
            call.suspect = None

    def _judge(self, route: ModelQueue, call: InflightRequest) -> None:
        """Isolate a new call, or refuse it, if its source or its fingerprint is suspect.

        Raises SourceQuarantined.
        """
        now_s, source = time.monotonic(), source_of(call)
        judged = self.sources.judge(source, now_s)
        if judged is Verdict.REFUSED:
            raise refusal(entry := self._refuse_source(route, source), entry.for_s)
        same = self.sources.judge(fingerprint(route.status.name, call), now_s, times=2.0)
        if max(judged, same) is not Verdict.FREE:
            self._isolate(call, judged, now_s, same)

    def _isolate(
        self, call: InflightRequest, judged: Verdict, now_s: float, same: Verdict = Verdict.FREE
    ) -> None:
        """Make a call run alone. `same` is the verdict on its fingerprint.

        Its next death is its last if its fingerprint or its key is known to kill. The verdict on a
        shared address does not count for that: the call may be of an innocent client.
        """
        source = source_of(call)
        known = same if is_shared(source) else max(judged, same)
        call.alone_until = "proven"
        call.deaths = max(call.deaths, ALONE_AT if known >= Verdict.WAITS else ALONE_AT - 1)
        pause_s = self.sources.pause_s(source, now_s) if judged is Verdict.WAITS else 0.0
        call.not_before_s = now_s + pause_s

    def _pause(self, route: ModelQueue, call: InflightRequest) -> None:
        """Let a call that is to run once more wait as the next request of its source does."""
        source, now_s = source_of(call), time.monotonic()
        if self.sources.judge(source, now_s) >= Verdict.WAITS:
            call.not_before_s = now_s + self.sources.whole_pause_s(source, now_s)
            self._dispatch_later(route, call)

    def _dispatch_later(self, route: ModelQueue, call: InflightRequest) -> None:
        wait_s = call.not_before_s - time.monotonic()
        if wait_s > 0:
            # uvloop's timers have a resolution of 1 ms, and may fire that much too early
            self._loop.call_later(wait_s + GRAIN_S, route.dispatch_all)

    def _line_up(self, route: ModelQueue, call: InflightRequest, size_bytes: int) -> None:
        route.suspects.push(call, call.key, call.priority, call.created_s, size_bytes)
        self._dispatch_later(route, call)
        route.dispatch_all()
        if call.replica is None and route.on_wait is not None:
            route.on_wait(route)

    def _judge_source(self, route: ModelQueue, source: str) -> None:
        """Judge a source after a death, and treat its waiting calls as if they came now."""
        judged = self.sources.judge(source, time.monotonic())
        if judged is Verdict.FREE:
            return
        if judged is not Verdict.REFUSED:
            self._isolate_waiting(route, source, judged)
            return
        entry = self._refuse_source(route, source)
        for call in waiting_of(route, source):
            route.withdraw(call)
            self._fail(call, refusal(entry, entry.for_s))

    def _note_running(self, source: str) -> None:
        """Count a proven request of an address as one that comes through: its end may be far."""
        if is_shared(source) and any(c.proven and source_of(c) == source for c in self._open):
            self.sources.pass_through(source, alone=False)

    def _isolate_waiting(self, route: ModelQueue, source: str, judged: Verdict) -> None:
        """Treat the waiting calls of a source as if they came now."""
        for call in waiting_of(route, source):
            if not (call.alone_until or call.emitted):
                route.withdraw(call)
                self._isolate(call, judged, time.monotonic())
                self._line_up(route, call, held_bytes(call))

    def _refuse_source(self, route: ModelQueue, source: str) -> Quarantined:
        for_s = self.sources.refuse_for_s(source, route.status.quarantine_s)
        now_s = time.monotonic()
        entry = self.quarantine.commit_source(route.status, source, for_s, now_s)
        if for_s > 0:
            self._report(entry)
        return entry

    def _tell_others(self) -> None:
        self._report(self.sources.take_report(self.name, time.monotonic()))

    def add_source_report(self, news: SourceReport) -> None:
        """Add another gateway's news of suspect sources, and isolate their waiting calls."""
        now_s = time.monotonic()
        self.sources.add_report(news, now_s)
        for source in news.charged_sources():
            self._note_running(source)
            judged = min(self.sources.judge(source, now_s), Verdict.WAITS)
            for route in self.routes.values() if judged is not Verdict.FREE else ():
                self._isolate_waiting(route, source, judged)

    def _refuse_waiting(self) -> None:
        """Fail the waiting calls of the sources that another gateway has refused."""
        now_s = time.monotonic()
        for route in self.routes.values():
            for call in route.order():
                error = None if call.emitted else self.quarantine.error(route.status, call, now_s)
                if isinstance(error, SourceQuarantined):
                    route.withdraw(call)
                    self._fail(call, error)

    # ---- ends

    def _cancel(self, call: InflightRequest) -> None:
        self._withdraw(call)
        call.fail(ClientClosed("the request was cancelled"))

    def _expire(self, call: InflightRequest) -> None:
        where = "waiting for a worker" if call.replica is None else "running"
        self._withdraw(call)
        call.fail(DeadlineExceeded(f"not done within {call.limit_s:g} s; it was {where}"))

    def _withdraw(self, call: InflightRequest) -> None:
        """Remove a call from its queue or its worker."""
        self._end(call)
        replica = call.replica
        if replica is not None:
            replica.cancel_call(call)
            self.on_free(replica)
        elif call.route is not None:
            call.route.withdraw(call)

    def _fail(self, call: InflightRequest, error: RequestError) -> None:
        self._end(call, charged=isinstance(error, RequestQuarantined))
        call.fail(error)

    def _begin(self, asked: ModelQueue, call: InflightRequest) -> None:
        self.requests += 1
        self._open.add(call)
        call.route = route = asked.base
        call.on_cancel = self._cancel
        self.measures.observe(asked, call)
        if call.caller is not None:
            call.caller.on_started(call)
        if not route.in_flight:
            route.pace.resume(self._loop.time())
            self.demand.resume()
        route.in_flight += 1

    def _end(self, call: InflightRequest, *, harmless: bool = False, charged: bool = True) -> None:
        """Finish a call: clear it of its deaths if it is `harmless` or proven, else charge them.

        With `charged` unset an unproven call is neither cleared nor charged.
        """
        self._open.remove(call)
        if harmless or call.proven:
            self._clear(call)
        elif charged:
            self._charge(call)
        if call.route is not None:
            call.route.left(call)
        if self.draining:
            self._note_idle()


def waiting_of(route: ModelQueue, source: str) -> list[InflightRequest]:
    """Return the waiting calls of a source whose clients have nothing of an answer.

    A whole answer is sent at its end, however many tokens earlier attempts have brought.
    """
    return [
        call
        for call in route.order()
        if source_of(call) == source and not (call.stream and call.emitted)
    ]
