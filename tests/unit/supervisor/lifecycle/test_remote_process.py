"""A worker on another machine as its supervisor has it, against a remote worker's own line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from servekit.protocol.control.startup_messages import GatewayConnected, Phase, PhaseReport
from servekit.protocol.messages import Drain, FromWorker, Load, Ping, Pong, Stop
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.tls import Authority, NotTrusted
from servekit.supervisor.lifecycle import remote_process as module
from servekit.supervisor.lifecycle.remote_process import RemoteChild, RemoteControl
from servekit.supervisor.process.child_process import Exit
from tests.unit.gateway.conftest import until
from tests.unit.worker.test_remote import OURS, READY, SPEC, Line, listening

DEADLINE_S = 30.0


class Launcher:
    """Who has launched it: ends it when asked, and says how it has ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.causes: list[str] = []
        self.obeys = True

    async def kill(self, cause: str) -> None:
        self.causes.append(cause)
        if not self.obeys:
            await asyncio.Event().wait()
        self.end(Exit(None, 9, ("last line",)))

    def end(self, exit_: Exit) -> None:
        if not self.ended.done():
            self.ended.set_result(exit_)

    async def exited(self) -> Exit:
        return await asyncio.shield(self.ended)

    async def dump(self) -> Sequence[str]:
        return ("Thread 1", "  in step")

    @property
    def hands(self) -> RemoteControl:
        return RemoteControl(self.kill, self.exited, self.dump)


class Pair:
    """A worker's line, and its supervisor's end."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.launcher = Launcher()
        self.heard: list[FromWorker] = []
        self.child: RemoteChild[FromWorker]

    async def attach(self, **how: Any) -> RemoteChild[FromWorker]:
        self.child = RemoteChild[FromWorker](
            "m/0",
            self.line.address,
            CertificateHolder(OURS.issue("supervisor", "s")),
            FromWorker,
            self.heard.append,
            self.launcher.hands,
            **how,
        )
        return await self.child.attach()

    async def exit(self) -> Exit:
        return await asyncio.wait_for(asyncio.shield(self.child.exited), DEADLINE_S)


@asynccontextmanager
async def pair(**how: Any) -> AsyncIterator[Pair]:
    async with listening() as line:
        made = Pair(line)
        await made.attach(**how)
        try:
            yield made
        finally:
            made.child.disconnect()


async def test_what_is_said_arrives_both_ways() -> None:
    async with pair() as both:
        both.child.send(Load(SPEC))
        both.child.send(Ping(1))
        await until(lambda: len(both.line.heard) == 2)
        both.line.remote.send(READY)
        both.line.remote.send(Pong(1, 0.0, 0, 0, 0.0))
        await until(lambda: len(both.heard) == 2)
        assert both.heard[0] == READY
        assert (both.child.state, both.child.here, both.child.forked) == ("empty", False, False)


async def test_a_broken_connection_loses_nothing_either_way() -> None:
    async with pair() as both:
        line, child = both.line, both.child
        child.send(Load(SPEC))
        await until(lambda: line.heard == [Load(SPEC)])
        for n in range(3):
            control = line.remote._control
            assert control is not None
            control.abort()
            line.remote.send(GatewayConnected(f"gateway/{n}", time.monotonic()))
            child.send(Drain())
            child.send(Ping(n))  # about the moment: it may be lost
            await until(partial(has_heard, both.heard, GatewayConnected, n + 1))
            await until(partial(has_heard, line.heard, Drain, n + 1))
        said = [message.gateway for message in both.heard if isinstance(message, GatewayConnected)]
        assert said == ["gateway/0", "gateway/1", "gateway/2"]
        assert line.heard.count(Load(SPEC)) == 1
        assert not child.exited.done()


def has_heard(heard: Sequence[Any], kind: type, count: int) -> bool:
    return sum(isinstance(message, kind) for message in heard) == count


async def test_a_new_supervisor_finds_it_as_it_is() -> None:
    async with pair() as both:
        both.child.send(Load(SPEC))
        await until(lambda: both.line.heard)
        both.line.remote.send(READY)
        first, both.heard = both.child, []
        second = await both.attach()
        assert (second.state, second.spec) == ("ready", SPEC)
        await until(lambda: both.heard == [READY])
        gone = await asyncio.wait_for(first.exited, DEADLINE_S)
        assert "another supervisor" in str(gone)
        assert not both.launcher.causes, "it is not killed for that"


async def test_its_times_are_told_by_our_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_s = 1e6
    async with listening() as line:
        both = Pair(line)
        monkeypatch.setattr("servekit.worker.remote.time", ClockAhead(ahead_s))
        child = await both.attach()
        began = time.monotonic()
        line.remote.send(PhaseReport(Phase("load", began + ahead_s, began + ahead_s + 1)))
        await until(lambda: both.heard)
        told = both.heard[0]
        assert isinstance(told, PhaseReport)
        assert told.phase.began_s == pytest.approx(began, abs=DEADLINE_S)
        child.disconnect()


class ClockAhead:
    """The module `time` of a machine that was started long before."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s


async def test_it_ends_as_its_launcher_says() -> None:
    async with pair() as both:
        both.launcher.end(Exit(3, None, ("no such model",)))
        assert await both.exit() == Exit(3, None, ("no such model",))


async def test_kill_has_it_killed_and_names_the_cause() -> None:
    async with pair() as both:
        await both.child.dump_and_kill("stalled")
        exit_ = await both.exit()
        assert (exit_.cause, exit_.signal) == ("stalled", 9)
        assert exit_.stacks == ("Thread 1", "  in step")
        assert both.launcher.causes == ["stalled"]


async def test_a_launcher_that_is_not_reached_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_KILL_S", 0.1)
    monkeypatch.setattr(module, "_SAY_S", 0.1)
    async with pair() as both:
        both.launcher.obeys = False
        both.child.kill("stalled")
        assert str(await both.exit()) == "stalled"


async def test_stop_asks_first() -> None:
    async with pair() as both:
        stopping = asyncio.create_task(both.child.stop(Stop(), DEADLINE_S))
        await until(lambda: both.line.heard == [Stop()])
        both.launcher.end(Exit(0, None, ()))
        assert await asyncio.wait_for(stopping, DEADLINE_S) == Exit(0, None, ())
        assert not both.launcher.causes


async def test_stop_insists() -> None:
    async with pair() as both:
        exit_ = await asyncio.wait_for(both.child.stop(Drain(), 0.1), DEADLINE_S)
        assert "did not stop within" in str(exit_)


async def test_one_that_is_not_reached_again_is_lost() -> None:
    async with pair(node_lost_s=0.5) as both:
        server, control = both.line.remote._server, both.line.remote._control
        assert server is not None
        assert control is not None
        server.close()
        control.abort()
        exit_ = await both.exit()
        assert exit_.cause.startswith("node lost: no answer for")
        await until(lambda: both.launcher.causes == [exit_.cause])


async def test_one_that_cannot_be_reached_at_all_is_named() -> None:
    async with listening() as line:
        both = Pair(line)
        line.address = "tcp://127.0.0.1:1"
        with pytest.raises(OSError):
            await both.attach()
        assert not both.launcher.causes


async def test_a_worker_of_another_cluster_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening() as line:
        monkeypatch.setattr(
            "tests.unit.supervisor.lifecycle.test_remote_process.OURS", Authority.new("c")
        )
        with pytest.raises(NotTrusted, match="another cluster"):
            await Pair(line).attach()
