"""A remote worker's line, over real TLS: who is let in, and what its supervisors are told."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterLoaded,
    AdapterSpec,
    AdapterUnloaded,
    SetAdapters,
)
from servekit.protocol.control.startup_messages import Phase, PhaseReport
from servekit.protocol.messages import (
    PROTOCOL,
    Drain,
    FromWorker,
    Hello,
    Load,
    Loading,
    ModelInfo,
    Ping,
    Pong,
    Progress,
    Ready,
    Stop,
    ToWorker,
    WorkerSpec,
)
from servekit.protocol.transport import remote_server as module
from servekit.protocol.transport.connection import Connection, dial_address
from servekit.protocol.transport.credentials import Role
from servekit.protocol.transport.remote_server import ListenOptions
from servekit.protocol.transport.resumable_channel import Attach, Attached, SupervisorReplaced
from servekit.protocol.transport.tls import Authority
from servekit.worker.remote import Summary, TcpChannel
from tests.unit.gateway.conftest import until

DEADLINE_S = 30.0
OURS = Authority.new("c")
SPEC = WorkerSpec(
    "m/0", "m", "echo", "p", None, "cpu", "auto", None, False, {}, {}, "tcp://127.0.0.1:1"
)
READY = Ready(ModelInfo(10, 1, True, "echo", "none", "cpu"), {"load": 1.5})
PHASED = PhaseReport(Phase("import", 1.0, 2.0))
SHELF = AdapterInfo("a", "LORA", "mixed", "it may")


class Line:
    """A line that listens, and what it has heard."""

    def __init__(self, grace_s: float) -> None:
        reading, writing = os.pipe()
        worker = OURS.issue("worker", "m/0")
        self.remote = TcpChannel(
            ListenOptions("tcp://127.0.0.1:0", "127.0.0.1", worker, writing, grace_s)
        )
        self.heard: list[ToWorker] = []
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.report = os.fdopen(reading)
        self.address = ""

    async def open(self) -> None:
        await self.remote.open(self.heard.append, self.ended.set_result)
        self.address = json.loads(self.report.readline())["address"]
        assert self.report.readline() == "", "nothing else is written, and it is closed"
        self.report.close()


@asynccontextmanager
async def listening(grace_s: float = 60.0) -> AsyncIterator[Line]:
    line = Line(grace_s)
    await line.open()
    try:
        yield line
    finally:
        await line.remote.close()
        assert line.remote._server is not None
        line.remote._server.close()


class Caller:
    """Someone who has dialled, and all that is said to them."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[Any] = asyncio.Queue()
        self.connection: Connection[Any]
        self.error: Exception | None = None

    @classmethod
    async def of(cls, line: Line, role: Role, *first: Any) -> Caller:
        caller = cls()

        def made() -> Connection[Any]:
            kinds = Hello | Attached | SupervisorReplaced | FromWorker
            return Connection(kinds, caller.told.put_nowait, caller._on_close)

        member = "m/0" if role == "worker" else "someone"
        caller.connection = await dial_address(line.address, made, OURS.issue(role, member))
        for message in first:
            caller.connection.send(message)
        return caller

    def _on_close(self, error: Exception | None) -> None:
        self.error = error

    async def next(self) -> Any:
        return await asyncio.wait_for(self.told.get(), DEADLINE_S)

    async def closed(self) -> None:
        await asyncio.wait_for(self.connection.closed, DEADLINE_S)


HELLO = Hello(PROTOCOL, "supervisor", "s")


async def attached(line: Line, session: str, have: int = 0) -> tuple[Caller, Attached]:
    caller = await Caller.of(line, "supervisor", HELLO, Attach(session, have))
    assert isinstance(await caller.next(), Hello)
    answer = await caller.next()
    assert isinstance(answer, Attached)
    return caller, answer


@pytest.mark.parametrize(
    ("role", "first", "said"),
    [
        ("gateway", HELLO, "its certificate says"),
        ("supervisor", Hello(PROTOCOL, "gateway", "g"), "its certificate says"),
        ("gateway", Hello(PROTOCOL, "worker", "w"), "its certificate says"),
        ("worker", Hello(PROTOCOL, "worker", "w"), "its certificate says"),
        ("gateway", Hello(PROTOCOL, "gateway", "g"), "not loaded yet"),
        ("supervisor", Hello(PROTOCOL + 1, "supervisor", "s"), "install the same servekit"),
        ("gateway", Ping(1), "not a message of this protocol"),
    ],
)
async def test_who_may_not_come_in_is_named(role: Role, first: Any, said: str) -> None:
    async with listening() as line:
        with structlog.testing.capture_logs() as logs:
            caller = await Caller.of(line, role, first)
            await caller.closed()
        [reason] = [entry["reason"] for entry in logs if "refused" in entry["event"]]
        assert said in reason
        assert not line.heard


async def test_who_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HELLO_S", 0.3)
    async with listening() as line:
        caller = await Caller.of(line, "gateway")
        await caller.closed()


async def test_a_supervisor_is_told_and_obeyed() -> None:
    async with listening() as line:
        caller, answer = await attached(line, "one")
        assert (answer.resumed, answer.state, answer.pid) == (False, "empty", os.getpid())
        caller.connection.send(Load(SPEC))
        line.remote.send(PHASED)
        line.remote.send(READY)
        assert [await caller.next() for _ in range(2)] == [PHASED, READY]
        await until(lambda: line.heard == [Load(SPEC)])


async def test_one_that_comes_back_misses_nothing_and_says_nothing_twice() -> None:
    async with listening() as line:
        caller, _ = await attached(line, "one")
        caller.connection.send(Load(SPEC))
        line.remote.send(PHASED)
        assert await caller.next() == PHASED
        caller.connection.abort()
        await until(lambda: line.remote._control is None)
        line.remote.send(READY)
        line.remote.send(Pong(1, 0.0, 0, 0, 0.0))
        caller, answer = await attached(line, "one", have=1)
        assert (answer.resumed, answer.have, answer.state) == (True, 1, "ready")
        assert await caller.next() == READY
        caller.connection.send(Drain())
        await until(lambda: line.heard == [Load(SPEC), Drain()])


async def test_a_new_one_is_told_all_and_the_old_one_to_go() -> None:
    async with listening() as line:
        old, _ = await attached(line, "one")
        old.connection.send(Load(SPEC))
        await until(lambda: line.heard)
        for said in (PHASED, Loading(Progress("load")), READY, AdapterLoaded(1, SHELF)):
            line.remote.send(said)
        new, answer = await attached(line, "two")
        assert (answer.resumed, answer.state, answer.spec) == (False, "ready", SPEC)
        assert await new.next() == PHASED
        ready = await new.next()
        assert ready.info.adapters == (SHELF,)
        words = [await old.next() for _ in range(5)]
        assert words[-1] == SupervisorReplaced()
        await old.closed()
        new.connection.send(Load(SPEC))  # it holds that already
        new.connection.send(Drain())
        await until(lambda: line.heard == [Load(SPEC), Drain()])
        assert not line.ended.done()


async def test_a_new_one_is_told_what_operators_have_added() -> None:
    added = (AdapterSpec("a", "/a"), AdapterSpec("b", "hub/b", "main"))
    async with listening() as line:
        first, answer = await attached(line, "one")
        assert answer.added == ()
        first.connection.send(SetAdapters(added[:1]))
        first.connection.send(SetAdapters(added))
        first.connection.send(Ping(1))
        await until(lambda: line.heard == [Ping(1)])
        _, answer = await attached(line, "two")
        assert answer.added == added


async def test_without_a_supervisor_it_ends_after_its_grace() -> None:
    async with listening(grace_s=0.5) as line:
        caller, _ = await attached(line, "one")
        assert line.remote._grace is not None
        assert line.remote._grace.cancelled()
        caller.connection.close()
        error = await asyncio.wait_for(line.ended, DEADLINE_S)
        assert "no supervisor for 0.5 s" in str(error)


async def test_without_any_grace_it_waits_for_the_first_supervisor() -> None:
    async with listening(grace_s=0.0) as line:
        caller, _ = await attached(line, "one")
        assert not line.ended.done()
        caller.connection.close()
        error = await asyncio.wait_for(line.ended, DEADLINE_S)
        assert "no supervisor for 0 s" in str(error)


async def test_the_first_supervisor_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FIRST_S", 0.05)
    async with listening(grace_s=0.0) as line:
        error = await asyncio.wait_for(line.ended, DEADLINE_S)
        assert "no supervisor for 0.05 s" in str(error)


async def test_the_last_words_are_heard() -> None:
    async with listening() as line:
        caller, _ = await attached(line, "one")
        line.remote.send(READY)
        await line.remote.close()
        assert await caller.next() == READY
        await caller.closed()


def test_a_summary_is_of_the_state_not_of_the_life() -> None:
    summary = Summary()
    assert summary.state(loading=True) == "loading"
    for n in range(100):
        summary.record(AdapterLoaded(n, SHELF))
        summary.record(AdapterUnloaded(n, "a"))
        summary.record(PhaseReport(Phase("import", 1.0, float(n))))
    summary.record(READY)
    summary.record(Stop())
    assert summary.replay_messages() == [PhaseReport(Phase("import", 1.0, 99.0)), READY]
    assert summary.state(loading=True) == "ready"
