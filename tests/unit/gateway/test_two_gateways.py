"""Two gateways and the same workers, some requests of which kill: in any order of events exactly
those are quarantined, and all others answered as if nothing had been.

Routers, runners, wards and the wire are the real ones; only the engines do what the test says.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from servekit.engines.api.base import Engine, Job, Load, Report, StepOutput
from servekit.engines.echo.run import EchoCodec
from servekit.errors import RequestError
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import (
    PROOF_TOKENS,
    ModelInfo,
    ModelStatus,
    Quarantined,
    ReplicaStatus,
    SamplingParams,
    SourceReport,
    Topology,
    WorkerSpec,
    WorkerState,
)
from servekit.protocol.transport.connection import Connection, listen_at
from servekit.worker.runner import Runner
from tests.unit.gateway.scripted import CountedCall, WarpLoop, expected

SLOTS = 8
WORKERS = 2
#: More turns of the loop than any message needs to have all its consequences.
TURNS = 40
#: First character of what kills at once, and of what kills with its second token.
AT_ONCE, AT_SECOND = "!", "?"
indices = st.integers(0, 7)


class ScriptedEngine(Engine):
    """Runs what it is given, a step when it is told to; some requests are the end of its worker."""

    def __init__(self, path: Path, die: Callable[[], None]) -> None:
        super().__init__(
            WorkerSpec(path.stem, "m", "echo", "-", None, "cpu", "", None, False, {}, {}, str(path))
        )
        self.codec = EchoCodec()
        self.vocab_size = 2**16
        self.info = ModelInfo(100, SLOTS, True, "scripted", "none", "cpu")
        self.runs: dict[int, tuple[Job, list[int]]] = {}  # each with its new tokens
        self._die = die

    def load(self, report: Report) -> ModelInfo:
        return self.info

    def start(self, emit: Any) -> None:
        self._emit = emit

    def submit(self, job: Job) -> None:
        self.runs[job.id] = job, []
        if job.prompt_ids[0] == ord(AT_ONCE):
            self._die()

    def cancel(self, job_id: int) -> None:
        self.runs.pop(job_id, None)

    def load_now(self) -> Load:
        return Load(len(self.runs), 0, 0.0, 0.0)

    def close(self) -> None:
        pass

    def step(self, job_id: int) -> None:
        job, new = self.runs[job_id]
        if job.prompt_ids[0] == ord(AT_SECOND) and new:
            self._die()
            return
        at = len(job.emitted) + len(new)
        new.append(job.prompt_ids[at % len(job.prompt_ids)])
        done = at + 1 == job.params.max_tokens
        if done:
            del self.runs[job_id]
        self._emit([StepOutput(job_id, new[-1:], "length" if done else None)])


class Worker:
    """The inside of a worker; when it dies what the kernel does not have yet is lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.alive = True
        self.connections: list[Connection[Any]] = []
        self.engine = ScriptedEngine(path, self.die)
        self.runner = Runner(self.engine, self.engine.info, on_idle=lambda: None)
        self.engine.start(self.runner.emit)

    async def start(self) -> None:
        self._server = await listen_at(self.path, self._connect)

    def _connect(self) -> Connection[Any]:
        self.connections.append(self.runner.connect())
        return self.connections[-1]

    def die(self) -> None:
        self.alive = False
        self._server.close()
        loop = asyncio.get_running_loop()
        for connection in self.connections:
            connection.abort()
            # One that has just been accepted gets its transport now; a dead process has none.
            loop.call_soon(connection.abort)

    def status(self) -> ReplicaStatus:
        state: WorkerState = "ready" if self.alive else "backoff"
        return ReplicaStatus(self.path.stem, state, str(self.path), 1, "cpu")

    @property
    def an_innocent_is_alone(self) -> bool:
        """By chance its death would be held against one that has done nothing."""
        held = self.runner.ward._alone
        return held is not None and not is_poison(held.request.prompt)


def is_poison(prompt: Any) -> bool:
    return bool(prompt[0] in (AT_ONCE, AT_SECOND))


class TwoGateways(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = WarpLoop()
        self.folder = tempfile.TemporaryDirectory()
        self.calls: list[tuple[CountedCall, asyncio.Task[str]]] = []
        self.count = 0
        self.failures: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self.workers: list[Worker] = []
        self.do(self._make_routers)
        self.replace_the_dead()
        for gateway, prompt in enumerate(("abc", "de", "!x", "fghi")):
            self.open(gateway % 2, prompt, 8, 1)

    def _make_routers(self) -> None:
        self.routers = [Router(f"gateway/{n}", self._forward) for n in range(2)]

    def _forward(self, news: Quarantined | SourceReport) -> None:
        """Forward what a gateway knows of sources to the others, as the supervisor does."""
        if isinstance(news, SourceReport):
            [other] = [router for router in self.routers if router.name != news.gateway]
            self.loop.call_soon(lambda: other.add_source_report(news))

    def do(self, act: Callable[[], object]) -> None:
        """Act on the loop, and let all that follows from it happen."""

        async def acting() -> None:
            act()
            for turn in range(TURNS):
                self.loop.ahead_s += 0.2 * (turn == TURNS // 2)
                await asyncio.sleep(0)

        self.loop.run_until_complete(acting())

    # ---- clients

    @rule(
        gateway=st.integers(0, 1),
        prompt=st.sampled_from(["abc", "de", "fghi", "!x", "?yz"]),
        tokens=st.integers(3, 8),
        times=st.integers(1, 6),
    )
    def open(self, gateway: int, prompt: str, tokens: int, times: int) -> None:
        for _ in range(times):
            call = CountedCall("m", SamplingParams(max_tokens=tokens), prompt=prompt)
            self.do(lambda: self._open(self.routers[gateway], call))  # noqa: B023

    def _open(self, router: Router, call: CountedCall) -> None:
        try:
            router.queue_call(call)
        except RequestError as error:
            assert error.code == "request_quarantined" and is_poison(call.prompt)
        else:
            self.calls.append((call, self.loop.create_task(self._consume(call))))

    async def _consume(self, call: CountedCall) -> str:
        return "".join([delta.text async for delta in call])

    @precondition(lambda self: self.calls)
    @rule(at=indices)
    def cancel(self, at: int) -> None:
        call, _ = self.calls[-1 - at % len(self.calls)]
        self.do(call.cancel)

    # ---- workers

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.alive]

    @rule(at=indices, job=indices, times=st.integers(1, 3))
    def step(self, at: int, job: int, times: int) -> None:
        for _ in range(times):
            busy = [worker for worker in self.alive if worker.engine.runs]
            if busy:
                engine = busy[at % len(busy)].engine
                jobs = list(engine.runs)
                self.do(lambda: engine.step(jobs[job % len(jobs)]))  # noqa: B023

    @rule()
    def step_all(self) -> None:
        def stepping() -> None:
            for worker in self.alive:
                for job in list(worker.engine.runs):
                    if worker.alive and job in worker.engine.runs:
                        worker.engine.step(job)

        self.do(stepping)

    @rule(times=st.integers(1, 4), steps=st.integers(0, 3))
    def crash_loop(self, times: int, steps: int) -> None:
        """Workers die of what they run, and others come."""
        for _ in range(times):
            for _ in range(steps):
                self.step_all()
                self.who_is_alone_has_only_proven_ones_beside_it()
            self.replace_the_dead()
            self.who_is_alone_has_only_proven_ones_beside_it()

    @rule()
    def replace_the_dead(self) -> None:
        self.do(self.tell)
        self.workers = self.alive
        while len(self.workers) < WORKERS:
            self.loop.run_until_complete(self._start())
        self.do(self.tell)

    async def _start(self) -> None:
        worker = Worker(Path(self.folder.name) / f"{self.count}.sock")
        self.count += 1
        await worker.start()
        self.workers.append(worker)

    def tell(self) -> None:
        replicas = tuple(worker.status() for worker in self.workers)
        status = ModelStatus("m", "echo", "-", 0, replicas, timeout_s=1e9)
        for router in self.routers:
            router.apply_topology(Topology((status,), gateways=2))

    @rule(at=indices)
    def kill(self, at: int) -> None:
        able = [worker for worker in self.alive if not worker.an_innocent_is_alone]
        if able:
            self.do(able[at % len(able)].die)

    @rule(at=indices, last=st.booleans())
    def a_connection_breaks(self, at: int, last: bool) -> None:
        able = [worker for worker in self.alive if not worker.an_innocent_is_alone]
        if able:
            self.do(able[at % len(able)].connections[-1 if last else -2].abort)

    # ---- what always holds

    @invariant()
    def nothing_went_wrong_on_the_loop(self) -> None:
        assert not self.failures, self.failures

    @invariant()
    def who_is_alone_has_only_proven_ones_beside_it(self) -> None:
        for worker in self.alive:
            held = worker.runner.ward._alone
            runs = worker.engine.runs
            if held is not None and held.job_id in runs:
                event("a suspect runs")
                others = [new for job, (_, new) in runs.items() if job != held.job_id]
                assert all(len(new) >= PROOF_TOKENS for new in others)
            event(f"held: {min(len(worker.runner.ward._queue), 3)}")

    @invariant()
    def nobody_waits_beside_a_free_slot(self) -> None:
        for worker in self.alive:
            used = sum(len(peer.jobs) for peer in worker.runner.peers)
            if used < SLOTS and not worker.runner.ward.closed:
                for router in self.routers:
                    route = router.routes["m"]
                    replica = route.replicas.get(str(worker.path))
                    if replica is not None and replica.routable:
                        assert not route.queue.size, "a free slot, and a call that may have it"
                        assert not any(replica.can_run(call) for call in route.choosy)

    @invariant()
    def only_poison_is_quarantined(self) -> None:
        for call, task in self.calls:
            if task.done() and isinstance(error := task.exception(), RequestError):
                assert error.code != "request_quarantined" or is_poison(call.prompt)
                event(f"ended by {error.code}")

    # ---- the end

    def teardown(self) -> None:
        try:
            for _ in range(1000):
                if all(call.done for call, _ in self.calls):
                    break
                self.step_all()
                if len(self.alive) < WORKERS:
                    self.replace_the_dead()
            self.do(lambda: None)
            self.check_ends()
        finally:
            self.leave()

    def check_ends(self) -> None:
        for call, task in self.calls:
            assert task.done() and call.ends == 1, (call.prompt, call.deaths)
            error = task.exception()
            if error is None:
                assert task.result() == expected(call)  # a token at a time, also what kills
                assert not str(call.prompt).startswith(AT_ONCE)
            else:
                assert isinstance(error, RequestError)
                assert error.code == "client_closed" or is_poison(call.prompt)
        for worker in self.alive:
            assert not worker.runner.ward.closed and not worker.runner.busy

    def leave(self) -> None:
        def leaving() -> None:
            for router in self.routers:
                router.apply_topology(Topology(()))
            for worker in self.alive:
                worker.die()

        self.do(leaving)
        self.loop.close()
        self.folder.cleanup()


TwoGateways.TestCase.settings = settings(
    max_examples=settings().max_examples // 4,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTwoGateways = TwoGateways.TestCase
