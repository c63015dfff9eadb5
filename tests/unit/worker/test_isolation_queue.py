"""Suspects are alone in a worker, whichever gateways the others come from; two of them here."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest

from servekit.engines.api.base import Engine, Job, Load, Report, StepOutput
from servekit.engines.echo.run import EchoCodec
from servekit.protocol.messages import (
    PROTOCOL,
    Cancel,
    DeltaBatch,
    Failed,
    Generate,
    Hello,
    IsolationEnded,
    IsolationStarted,
    ModelInfo,
    SamplingParams,
    TokenBatch,
    WorkerSpec,
    WorkerToGateway,
)
from servekit.protocol.transport.connection import Connection, dial_address, listen_at
from servekit.worker.preparation.request_preparation import LONG_PROMPT_CHARS
from servekit.worker.runner import Runner
from tests.unit.gateway.conftest import DEADLINE_S, until

Until = Literal["", "proven", "done"]


class Steps(Engine):
    """Runs what it is given, a token at a time, when the test says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            WorkerSpec("m/0", "m", "echo", "-", None, "cpu", "", None, False, {}, {}, str(path))
        )
        self.codec = EchoCodec()
        self.vocab_size = 2**16
        self.jobs: dict[str, Job] = {}  # by prompt
        self.submitted: list[str] = []
        self.heard: list[list[str]] = []  # what each gateway has been told by each submit
        self.gateways: list[Gateway] = []

    def load(self, report: Report) -> ModelInfo:
        return ModelInfo(10**6, 8, True, "steps", "none", "cpu")

    def start(self, emit: Any) -> None:
        self._emit = emit

    def submit(self, job: Job) -> None:
        prompt = "".join(map(chr, job.prompt_ids))
        self.jobs[prompt] = job
        self.submitted.append(prompt[:10])
        self.heard.append([gateway.heard() for gateway in self.gateways])

    def cancel(self, job_id: int) -> None:
        self.jobs = {prompt: job for prompt, job in self.jobs.items() if job.id != job_id}

    def load_now(self) -> Load:
        return Load(len(self.jobs), 0, 0.0, 0.0)

    def close(self) -> None:
        pass

    def step(self, prompt: str, finish: Literal["stop"] | None = None) -> None:
        job = self.jobs.pop(prompt) if finish else self.jobs[prompt]
        self._emit([StepOutput(job.id, [97], finish)])


class Gateway:
    """One end of a connection: what it has been told, in order."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    async def dial(self, path: str) -> None:
        self.connection: Connection[WorkerToGateway] = await dial_address(
            path, lambda: Connection(WorkerToGateway, self.got.append, lambda error: None)
        )
        self.connection.send(Hello(PROTOCOL, "gateway", "g"))
        await until(lambda: self.got)

    def ask(self, id: int, prompt: str, alone_until: Until = "") -> None:
        params = SamplingParams(max_tokens=50)
        self.connection.send(Generate(id, params, prompt=prompt, alone_until=alone_until))

    def heard(self) -> str:
        """What has left the worker for good: read already, or in this end's socket."""
        assert self.connection._transport is not None
        sock = self.connection._transport.get_extra_info("socket")
        with socket.socket(fileno=sock.dup().detach()) as mine:
            try:
                unread = mine.recv(10**6, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                unread = b""
        return f"{self.words}{unread!r}"

    @property
    def words(self) -> list[IsolationStarted | IsolationEnded]:
        return [
            message
            for message in self.got
            if isinstance(message, IsolationStarted | IsolationEnded)
        ]


class Scene:
    def __init__(self, path: Path) -> None:
        self.engine = Steps(path)
        self.idle = asyncio.Event()
        info = self.engine.load(lambda progress: None)
        self.runner = Runner(self.engine, info, on_idle=self.idle.set)
        self.engine.start(self.runner.emit)

    async def open(self) -> None:
        self.server = await listen_at(self.engine.spec.socket, self.runner.connect)
        self.a, self.b = [await self.gateway() for _ in range(2)]

    async def gateway(self) -> Gateway:
        gateway = Gateway()
        await gateway.dial(self.engine.spec.socket)
        self.engine.gateways.append(gateway)
        return gateway

    async def runs(self, *prompts: str) -> None:
        """Until exactly these have been submitted, ever."""
        await until(lambda: self.engine.submitted == [prompt[:10] for prompt in prompts])

    async def in_line(self, count: int) -> None:
        await until(lambda: len(self.runner.ward._queue) == count)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path / "s")
    await scene.open()
    yield scene
    scene.server.close()
    for gateway in scene.engine.gateways:
        gateway.connection.abort()


async def test_a_suspect_waits_for_proof_and_the_others_wait_for_its(scene: Scene) -> None:
    a, b, engine = scene.a, scene.b, scene.engine
    b.ask(1, "running")
    await scene.runs("running")
    a.ask(1, "suspect", "proven")
    await scene.in_line(1)
    b.ask(2, "late")
    await scene.in_line(2)
    engine.step("running")
    await until(lambda: len(b.got) == 2)
    assert engine.submitted == ["running"], "a prefill alone proves nothing"
    engine.step("running")
    await scene.runs("running", "suspect")
    await until(lambda: b.words)
    assert (a.words, b.words) == ([IsolationStarted(1)], [IsolationStarted(0)])
    assert [type(message) for message in b.got] == [Hello, DeltaBatch, TokenBatch, IsolationStarted]
    engine.step("suspect")
    await until(lambda: len(a.got) == 3)
    assert not engine.submitted[2:]
    engine.step("suspect")
    await scene.runs("running", "suspect", "late")
    await until(lambda: a.words[1:] and b.words[1:])
    assert a.words[1:] == b.words[1:] == [IsolationEnded()]
    assert isinstance(a.got[-2], DeltaBatch | TokenBatch), "its proof is there before"
    assert not scene.runner.ward.closed


async def test_all_gateways_have_been_told_when_it_is_started(scene: Scene) -> None:
    """In their sockets: the next thing that happens may be the death of this process."""
    scene.a.ask(1, "suspect", "proven")
    scene.b.ask(1, "late")
    await scene.runs("suspect")
    assert all("IsolationStarted" in heard for heard in scene.engine.heard[0])
    scene.engine.step("suspect", "stop")
    await scene.runs("suspect", "late")
    assert all("IsolationEnded" in heard for heard in scene.engine.heard[1])


async def test_suspects_go_one_after_another_in_the_order_they_came(scene: Scene) -> None:
    a, b, engine = scene.a, scene.b, scene.engine
    a.ask(1, "first", "proven")
    await scene.runs("first")
    b.ask(1, "between")
    b.ask(2, "second", "proven")
    await scene.in_line(2)
    engine.step("first")
    engine.step("first")
    await scene.runs("first", "between")
    engine.step("between")
    engine.step("between")
    await scene.runs("first", "between", "second")
    await until(lambda: len(a.words) == len(b.words) == 3)
    assert a.words == [IsolationStarted(1), IsolationEnded(), IsolationStarted(0)]
    assert b.words == [IsolationStarted(0), IsolationEnded(), IsolationStarted(2)]


async def test_who_has_the_last_chance_is_alone_until_it_is_done(scene: Scene) -> None:
    scene.a.ask(1, "last", "done")
    await scene.runs("last")
    scene.b.ask(1, "late")
    await scene.in_line(1)
    for _ in range(5):
        scene.engine.step("last")
    await until(
        lambda: sum(isinstance(message, DeltaBatch | TokenBatch) for message in scene.a.got) > 0
    )
    assert scene.engine.submitted == ["last"]
    scene.engine.step("last", "stop")
    await scene.runs("last", "late")


async def test_cancelling_works_in_line_and_alone(scene: Scene) -> None:
    a, b, engine = scene.a, scene.b, scene.engine
    a.ask(1, "alone", "proven")
    await scene.runs("alone")
    b.ask(1, "held")
    b.ask(2, "suspect", "proven")
    b.ask(3, "late")
    await scene.in_line(3)
    b.connection.send(Cancel(1))
    b.connection.send(Cancel(2))
    await scene.in_line(1)
    a.connection.send(Cancel(1))
    await scene.runs("alone", "late")
    assert list(engine.jobs) == ["late"]
    assert not scene.runner.ward.closed


async def test_the_end_of_a_gateway_forgets_what_it_had_in_line(scene: Scene) -> None:
    a, b = scene.a, scene.b
    a.ask(1, "alone", "proven")
    await scene.runs("alone")
    a.ask(2, "suspect", "proven")
    b.ask(1, "late")
    await scene.in_line(2)
    a.connection.abort()
    await scene.runs("alone", "late")
    assert b.words == [IsolationStarted(0), IsolationEnded()]


async def test_a_request_that_was_cancelled_may_be_in_the_step_that_runs(scene: Scene) -> None:
    scene.b.ask(1, "running")
    await scene.runs("running")
    scene.a.ask(1, "suspect", "proven")
    await scene.in_line(1)
    began_s = scene.runner.loop.time()
    scene.b.connection.send(Cancel(1))
    await scene.runs("running", "suspect")
    assert scene.runner.loop.time() - began_s >= 0.1


async def test_a_gateway_that_connects_meanwhile_is_told(scene: Scene) -> None:
    scene.a.ask(1, "suspect", "proven")
    await scene.runs("suspect")
    late = await scene.gateway()
    await until(lambda: late.words == [IsolationStarted(0)])
    late.ask(1, "late")
    await scene.in_line(1)
    scene.engine.step("suspect", "stop")
    await scene.runs("suspect", "late")
    assert late.words == [IsolationStarted(0), IsolationEnded()]


async def test_a_long_prompt_is_not_touched_before_its_turn(scene: Scene) -> None:
    """It may be its tokenising that kills; and while another's is tokenised nobody is alone."""
    long = "x" * (LONG_PROMPT_CHARS + 1)
    scene.b.ask(1, long)
    scene.a.ask(1, "s" + long, "proven")
    await scene.runs(long)
    await scene.in_line(1)
    scene.engine.step(long, "stop")
    await scene.runs(long, "s" + long)
    assert all("IsolationStarted" in heard for heard in scene.engine.heard[1])


async def test_what_is_refused_is_not_waited_for(scene: Scene) -> None:
    scene.a.ask(1, "", "proven")
    scene.b.ask(1, "late")
    await scene.runs("late")
    await until(lambda: scene.b.words == [IsolationStarted(0), IsolationEnded()])
    assert any(isinstance(message, Failed) for message in scene.a.got)


async def test_draining_waits_for_those_in_line(scene: Scene) -> None:
    scene.a.ask(1, "suspect", "proven")
    await scene.runs("suspect")
    scene.b.ask(1, "late")
    await scene.in_line(1)
    scene.runner.draining = True
    assert scene.runner.busy
    scene.engine.step("suspect", "stop")
    await scene.runs("suspect", "late")
    assert not scene.idle.is_set()
    scene.engine.step("late", "stop")
    async with asyncio.timeout(DEADLINE_S):
        await scene.idle.wait()


async def test_a_gateway_that_does_not_read_keeps_nobody_waiting_for_long(scene: Scene) -> None:
    """Its suspect is not started before it knows; the others are."""
    a, b = scene.a, scene.b
    assert a.connection._transport is not None
    a.connection._transport.pause_reading()
    for peer in scene.runner.peers:
        peer.connection.send(Failed(99, "x", "y" * 10**6))  # more than a socket takes
    a.ask(1, "suspect", "proven")
    b.ask(1, "innocent")
    await scene.runs("innocent")
    scene.engine.step("innocent", "stop")
    a.connection._transport.resume_reading()
    await scene.runs("innocent", "suspect")
    await until(lambda: a.words and a.words[-1] == IsolationStarted(1))


async def test_a_suspect_that_waits_when_the_engine_dies_is_forgotten(scene: Scene) -> None:
    """Its gateway has hung up: a queue that tried to tell it would turn round and round."""
    a, b, engine = scene.a, scene.b, scene.engine
    b.ask(1, "proven")
    await scene.runs("proven")
    engine.step("proven")
    engine.step("proven")
    a.ask(1, "running")
    await scene.runs("proven", "running")
    a.ask(2, "suspect", "proven")
    await scene.in_line(1)
    assert b.connection._transport is not None
    b.connection._transport.pause_reading()  # the worker waits a while for it
    job = engine.jobs["proven"]
    scene.runner.emit([StepOutput(job.id, [97] * 2_000_000)])
    engine.fatal = RuntimeError("it broke")
    async with asyncio.timeout(DEADLINE_S):
        await scene.runner.disconnect_all()
        await until(lambda: not scene.runner.ward.closed)
