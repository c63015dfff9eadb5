"""The router under random orders of events: every call ends exactly once, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servekit.errors import RequestError
from servekit.gateway.routing.failures.quarantine import fingerprint
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.worker_connection import WorkerConnection
from servekit.protocol.messages import (
    ModelStatus,
    Quarantined,
    SamplingParams,
    SourceReport,
    Topology,
    WorkerState,
)
from tests.unit.gateway.scripted import CountedCall, ScriptedWorker, WarpLoop, expected

SLOTS = 2
MOST_WORKERS = 3
#: More turns of the loop than any message needs to have all its consequences.
TURNS = 25
EXPECTED_ERRORS = {
    "client_closed",
    "engine_error",
    "model_unavailable",
    "queue_full",  # given back to the key that waits most, for another's
    "request_quarantined",
    "timeout",
}
indices = st.integers(0, 5)


class Service(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = WarpLoop()
        self.folder = tempfile.TemporaryDirectory()
        self.workers: list[ScriptedWorker] = []
        self.calls: list[tuple[CountedCall, asyncio.Task[str]]] = []
        self.count = 0
        self.failures: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self.quarantined: list[Quarantined] = []
        self.do(self._make_router)
        self.start()
        for prompt in ("a", "bc", "def"):
            self.open_one(prompt, 8, True, "x", 0, None)

    def _make_router(self) -> None:
        self.router = Router("gateway/test", self._quarantine)
        self.tell()

    def _quarantine(self, report: Quarantined | SourceReport) -> None:
        assert isinstance(report, Quarantined), "the only gateway has no others to tell"
        self.quarantined.append(report)

    def do(self, act: Callable[[], object]) -> None:
        """Act on the loop, and let all that follows from it happen."""

        async def acting() -> None:
            act()
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(acting())

    # ---- clients

    @rule(
        prompt=st.sampled_from(["a", "bc", "def"]),
        tokens=st.integers(1, 8),
        stream=st.booleans(),
        key=st.sampled_from("xy"),
        priority=st.integers(-2, 2),
        timeout_s=st.none() | st.integers(1, 60),
        times=st.integers(1, 3),
    )
    def open(self, times: int, **asked: Any) -> None:
        for _ in range(times):
            self.open_one(**asked)

    def open_one(
        self,
        prompt: str,
        tokens: int,
        stream: bool,
        key: str,
        priority: int,
        timeout_s: float | None,
    ) -> None:
        params = SamplingParams(max_tokens=tokens)
        call = CountedCall(
            "m", params, prompt=prompt, stream=stream, key=key, priority=priority
        )  # fmt: skip

        def opening() -> None:
            with contextlib.suppress(RequestError):  # refused at once: not a call at all
                self.router.queue_call(call, timeout_s)
                self.calls.append((call, self.loop.create_task(self._consume(call))))
                self.router.follow_position(call)

        self.do(opening)

    async def _consume(self, call: CountedCall) -> str:
        parts: list[str] = []
        while True:
            delta = await call.next_delta()
            parts.append(delta.text)
            if delta.finish is not None:
                assert delta.completion_tokens == call.params.max_tokens
                return "".join(parts)

    @precondition(lambda self: self.calls)
    @rule(at=indices)
    def cancel(self, at: int) -> None:
        call, _ = self.calls[-1 - at % len(self.calls)]
        self.do(call.cancel)

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        self.loop.ahead_s += seconds
        self.do(lambda: None)

    # ---- workers

    @property
    def alive(self) -> list[ScriptedWorker]:
        return [worker for worker in self.workers if worker.alive]

    @precondition(lambda self: len(self.alive) < MOST_WORKERS)
    @rule()
    def start(self) -> None:
        worker = ScriptedWorker(Path(self.folder.name) / f"{self.count}.sock", SLOTS)
        self.count += 1
        self.loop.run_until_complete(worker.start())
        self.workers = [*self.alive, worker]
        self.do(self.tell)

    @rule(at=indices, job=indices, count=st.integers(1, 4))
    def generate(self, at: int, job: int, count: int) -> None:
        busy = [worker for worker in self.alive if worker.jobs]
        if busy:
            worker = busy[at % len(busy)]
            jobs = list(worker.jobs)
            self.do(lambda: worker.generate(jobs[job % len(jobs)], count))

    @rule(at=indices)
    def refuse(self, at: int) -> None:
        busy = [worker for worker in self.alive if worker.jobs]
        if busy:
            worker = busy[at % len(busy)]
            self.do(lambda: worker.refuse(next(iter(worker.jobs))))

    @precondition(lambda self: self.alive)
    @rule(at=indices, last_words=st.booleans())
    def kill(self, at: int, last_words: bool) -> None:
        worker = self.alive[at % len(self.alive)]

        def killing() -> None:
            if last_words:
                for job in list(worker.jobs):
                    worker.generate(job, 1)
            worker.kill()

        worker.state = "backoff"
        self.do(killing)

    @precondition(lambda self: any(worker.jobs for worker in self.alive))
    @rule(times=st.integers(1, 3), at_once=st.integers(1, 2))
    def crash_loop(self, times: int, at_once: int) -> None:
        """Workers that die of what they are sent, before they bring a token; then others come."""
        for _ in range(times):
            for worker in self.alive:
                worker.state = "backoff"
                self.do(worker.kill)
            for _ in range(at_once):
                self.start()
            self.a_suspect_has_only_proven_calls_beside_it()
            event(f"suspects wait: {len(self.router.routes['m'].suspects) > 0}")
        event(f"quarantined: {len(self.quarantined) > 0}")

    @precondition(lambda self: self.alive)
    @rule(at=indices, how=st.sampled_from(["stalled", "draining"]))
    def retire(self, at: int, how: WorkerState) -> None:
        worker = self.alive[at % len(self.alive)]
        worker.state = how
        worker.draining = how == "draining"

    # ---- the supervisor

    @rule()
    def supervisor_tells(self) -> None:
        self.do(self.tell)

    @rule()
    def breaker_opens(self) -> None:
        """All that is not alive has failed for good."""
        for worker in self.workers:
            if not worker.alive:
                worker.state = "failed"
        self.do(self.tell)

    @precondition(lambda self: self.calls)
    @rule(at=indices)
    def another_gateway_quarantines(self, at: int) -> None:
        call, _ = self.calls[at % len(self.calls)]
        self.quarantined.append(Quarantined(fingerprint("m", call), "m", 0.0, 600.0))
        self.do(self.tell)

    @rule()
    def forget_quarantines(self) -> None:
        self.quarantined.clear()
        self.router.quarantine = type(self.router.quarantine)()

    def tell(self) -> None:
        replicas = tuple(worker.status() for worker in self.workers)
        status = ModelStatus("m", "echo", "-", 0, replicas, timeout_s=300.0, max_queue=6)
        self.router.apply_topology(Topology((status,), quarantined=tuple(self.quarantined)))

    # ---- what always holds

    @property
    def replicas(self) -> list[WorkerConnection]:
        return list(self.router.routes["m"].replicas.values())

    @invariant()
    def nothing_went_wrong_on_the_loop(self) -> None:
        assert not self.failures, self.failures

    @invariant()
    def every_call_waits_or_runs_or_is_over(self) -> None:
        route = self.router.routes["m"]
        pending = [call for call, _ in self.calls if not call.done]
        assert len(pending) == self.router.in_flight == route.in_flight
        waiting = route.order()
        running = [c for replica in route.replicas.values() for c in replica.calls.values()]
        assert sorted(map(id, pending)) == sorted(map(id, [*waiting, *running]))
        assert route.waiting == len(waiting)
        assert all(call.ends == call.done for call, _ in self.calls)

    @invariant()
    def what_is_over_is_not_kept(self) -> None:
        last = self.router.routes["m"]._on_trial
        assert last is None or not last.done, "its prompt may have megabytes"

    @invariant()
    def nobody_waits_beside_an_open_slot(self) -> None:
        route = self.router.routes["m"]
        assert not (len(route.queue) and route.has_room), "a free slot and a queue"
        free = [r for r in route.replicas.values() if r.routable and not r.calls]
        serving = [r for r in route.replicas.values() if r.routable and not r.held]
        if len(serving) == 1 and route._recovering:
            free = []  # the last one is not put at risk while another is on its way
        trial = any(c.alone_until and not c.proven for r in self.replicas for c in r.calls.values())
        assert not (route.suspects and free and not trial), "an empty replica and a suspect"
        assert all(r.calls for r in self.replicas if r.routable and r.held), (
            "a replica held for nobody"
        )

    @invariant()
    def a_suspect_has_only_proven_calls_beside_it(self) -> None:
        for replica in self.router.routes["m"].replicas.values():
            calls = list(replica.calls.values())
            suspects = [c for c in calls if c.alone_until and not c.proven]
            assert len(suspects) <= 1
            if suspects and replica.alone is not None:
                assert replica.alone == suspects[0].wire_id
                assert all(call.proven for call in calls if call is not suspects[0])
            assert not suspects or replica.credits <= 0

    # ---- the end

    def teardown(self) -> None:
        try:
            for worker in self.alive:
                worker.kill()
                worker.state = "stopped"
            self.do(lambda: None)
            self.start()
            self.do(self.router.drain)
            for _ in range(200):
                if self.router.idle.is_set():
                    break
                self.finish_everything()
            self.check_ends()
        finally:
            self.leave()

    def finish_everything(self) -> None:
        self.loop.ahead_s += 1.0  # a worker that went is dialled again after a while

        def finishing() -> None:
            for worker in self.alive:
                for job in list(worker.jobs):
                    worker.generate(job, 100)

        self.do(finishing)

    def check_ends(self) -> None:
        assert self.router.idle.is_set(), "a call never ended"
        for call, task in self.calls:
            assert task.done() and call.ends == 1
            error = task.exception()
            if error is None:
                assert task.result() == expected(call)
            else:
                assert isinstance(error, RequestError) and error.code in EXPECTED_ERRORS, error

    def leave(self) -> None:
        def leaving() -> None:
            self.router.apply_topology(Topology(()))
            for worker in self.alive:
                worker.kill()

        self.do(leaving)
        self.loop.close()
        self.folder.cleanup()


Service.TestCase.settings = settings(
    max_examples=settings().max_examples // 4,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRouter = Service.TestCase
