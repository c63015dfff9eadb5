"""The actors of an instance: places, starts, output, figures and ends of their processes.

There is no Ray here: the test answers for the process that talks to it, and a line of a worker
stands for the process in the actor.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from servekit.config.sections.cluster import RayConfig
from servekit.protocol.control.ray_messages import (
    ClusterJoined,
    Exited,
    GetStrayMemory,
    JoinCluster,
    Measured,
    PlacementWaits,
    PlaceReleased,
    PlaceWorker,
    ReleasePlace,
    RemoteGpu,
    RequestFailed,
    Running,
    Signal,
    Start,
    Started,
    StrayMemory,
    WorkerPlaced,
)
from servekit.protocol.messages import FromWorker, GpuStatus
from servekit.protocol.transport.credentials import Credentials, Renew
from servekit.ray import actors as module
from servekit.ray.actors import RayActors, StartOrder
from servekit.ray.certificates import Certificates
from servekit.ray.client import Cluster, Unable
from servekit.supervisor.lifecycle.remote_process import RemoteChild
from servekit.supervisor.workers.gpu_memory import RemoteGpus
from tests.polling import poll_async
from tests.unit.ray.test_client import Child
from tests.unit.supervisor.test_gateway_process import Alone
from tests.unit.worker.test_remote import OURS, Line, listening

Question = TypeVar("Question", bound=msgspec.Struct)

NAME, HOST = "m/0", "10.0.0.2"
GPU = RemoteGpu(1, "GPU-aa", "H200", 100)
OTHER = GpuStatus(0, "GPU-bb", "H200", 100, 10, 0.0)


class Stage:
    """The actors, and what they ask of the cluster and tell a worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = Alone(folder / "run")
        self.certificates = Certificates(OURS, 86400.0)
        self.actors = RayActors(self.certificates)
        self.cluster = Cluster(self.host, RayConfig(), "space", (), self.actors)
        self.actors.cluster = self.cluster
        self.child = Child()
        child: Any = self.child
        self.cluster.child = child
        self.cluster.change_state("start")
        self.cluster.send_greeting()
        join = self.asked(JoinCluster)
        self.cluster.receive(ClusterJoined(join.id, (), 1))
        self.waits: list[str] = []
        self.measured: list[RemoteGpus] = []
        self.lines: list[str] = []
        self.children: list[RemoteChild[Any]] = []

    def asked(self, kind: type[Question]) -> Question:
        """The one thing of that kind that the cluster was sent."""
        [found] = [one for one in self.child.sent if isinstance(one, kind)]
        self.child.sent.remove(found)
        return found

    async def next(self, kind: type[Question]) -> Question:
        sent = self.child.sent
        await poll_async("it is asked", lambda: any(isinstance(one, kind) for one in sent))
        return self.asked(kind)

    def enter(self) -> asyncio.Task[str]:
        return asyncio.create_task(
            self.actors.enter(
                NAME,
                self.waits.append,
                lambda id: PlaceWorker(id, NAME, "m", 1, 1.0, "PACK", "print"),
                self.measured.append,
            )
        )

    async def place(self, *gpus: RemoteGpu, running: Running | None = None) -> None:
        entering = self.enter()
        asked = await self.next(PlaceWorker)
        self.cluster.receive(WorkerPlaced(asked.id, HOST, gpus, running))
        assert await entering == ""

    @property
    def order(self) -> StartOrder:
        return StartOrder(
            ("--name", NAME), {"A": "b"}, "print", self.folder / "log", pin="index",
            listen=(("0.0.0.0", 80),),
        )  # fmt: skip

    def start(self) -> asyncio.Task[RemoteChild[Any]]:
        starting = self.actors.start_process(
            NAME, self.order, FromWorker, lambda message: None, self.lines.append
        )
        return asyncio.create_task(starting)

    async def run(self, line: Line, pid: int = 7) -> RemoteChild[Any]:
        """Start the process, whose line is there already."""
        starting = self.start()
        asked = await self.next(Start)
        self.cluster.receive(Started(asked.id, pid, line.address))
        return self.keep(await starting, pid)

    def keep(self, child: RemoteChild[Any], pid: int) -> RemoteChild[Any]:
        child.pid = pid  # of the actor's process, where the line is in ours
        self.children.append(child)
        return child


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for child in made.children:
        child.disconnect()
    made.host.run_dir.unlock()


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    async with listening() as made:
        yield made


# ---------------------------------------------------------------- places


async def test_a_process_waits_for_its_place_and_is_told_what_for(stage: Stage) -> None:
    entering = stage.enter()
    asked = await stage.next(PlaceWorker)
    assert (asked.name, asked.fingerprint) == (NAME, "print")
    assert stage.measured == [RemoteGpus()], "it has no GPU yet"
    assert (stage.actors.host(NAME), stage.actors.describe_place(NAME)) == ("", "")
    stage.cluster.receive(PlacementWaits(NAME, "1 GPU"))
    stage.cluster.receive(PlacementWaits("another/0", "2 GPUs"))
    stage.cluster.receive(WorkerPlaced(asked.id, HOST, (GPU,)))
    assert await entering == ""
    assert stage.waits == ["1 GPU", ""]
    assert stage.actors.host(NAME) == HOST
    assert stage.actors.describe_place(NAME) == f"GPU 1 (H200) on {HOST}"
    [gpu] = stage.measured[-1].own
    assert (gpu.index, gpu.uuid, gpu.total_bytes, gpu.node) == (1, "GPU-aa", 100, HOST)
    assert stage.measured[-1].gpus == (gpu,)


async def test_a_place_on_a_cpu_is_named_by_its_node(stage: Stage) -> None:
    await stage.place()
    assert stage.actors.describe_place(NAME) == f"cpu on {HOST}"
    assert stage.actors.describe_place("another/0") == stage.actors.host("another/0") == ""


async def test_why_there_is_no_place_is_told_and_it_waits_no_longer(stage: Stage) -> None:
    await stage.place(GPU)
    entering = stage.enter()
    asked = await stage.next(PlaceWorker)
    assert stage.actors.host(NAME) == "", "the place before is lost"
    assert stage.measured[-1] == RemoteGpus()
    stage.cluster.receive(PlacementWaits(NAME, "a node"))
    stage.cluster.receive(RequestFailed(asked.id, "there is no such node"))
    assert await entering == "there is no such node"
    assert stage.waits[-2:] == ["a node", ""]


async def test_a_place_is_released_once(stage: Stage) -> None:
    await stage.place(GPU)
    releasing = asyncio.create_task(stage.actors.release_place(NAME))
    asked = await stage.next(ReleasePlace)
    assert asked.name == NAME and stage.actors.host(NAME) == ""
    stage.cluster.receive(PlaceReleased(asked.id))
    await releasing
    await stage.actors.release_place(NAME)
    assert stage.child.sent == [], "it has none any more"


async def test_a_place_that_cannot_be_released_holds_nobody_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.place()
    releasing = asyncio.create_task(stage.actors.release_place(NAME))
    asked = await stage.next(ReleasePlace)
    stage.cluster.receive(RequestFailed(asked.id, "it is gone"))
    await releasing
    await stage.place()
    monkeypatch.setattr(module, "VACATE_S", 0.01)
    await stage.actors.release_place(NAME)  # without an answer


async def test_memory_held_elsewhere_is_told_and_unknown_where_nobody_answers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking = asyncio.create_task(stage.actors.strays(NAME))
    asked = await stage.next(GetStrayMemory)
    stage.cluster.receive(StrayMemory(asked.id, "holds 3 GiB on GPU 2"))
    assert await asking == "holds 3 GiB on GPU 2"
    asking = asyncio.create_task(stage.actors.strays(NAME))
    asked = await stage.next(GetStrayMemory)
    stage.cluster.receive(RequestFailed(asked.id, "it is gone"))
    assert await asking == ""
    monkeypatch.setattr(module, "VACATE_S", 0.01)
    assert await stage.actors.strays(NAME) == ""


# ---------------------------------------------------------------- starts


async def test_a_process_is_started_with_its_order_and_a_certificate(
    stage: Stage, line: Line
) -> None:
    await stage.place(GPU)
    starting = stage.start()
    asked = await stage.next(Start)
    order = stage.order
    assert (asked.name, asked.args, asked.env) == (NAME, order.args, order.env)
    assert (asked.fingerprint, asked.pin, asked.role) == ("print", "index", "worker")
    assert asked.listen == order.listen
    issued = Credentials.from_bytes(asked.credentials)
    assert (issued.role, issued.member, issued.authority) == ("worker", NAME, OURS.certificate)
    assert stage.certificates.due("worker", NAME) is None, "it is known, and fresh"
    stage.cluster.receive(Started(asked.id, 7, line.address))
    child = stage.keep(await starting, 7)
    assert (child.name, child.address, child.state) == (NAME, line.address, "empty")


async def test_a_process_that_cannot_be_started_is_told_with_its_last_line(stage: Stage) -> None:
    await stage.place()
    starting = stage.start()
    asked = await stage.next(Start)
    stage.actors.lines(NAME, ("  no such module ", '{"event": "ours"}'))
    stage.cluster.receive(RequestFailed(asked.id, "it ended at once"))
    with pytest.raises(Unable) as caught:
        await starting
    assert caught.value.message == "it ended at once: no such module"
    starting = stage.start()
    asked = await stage.next(Start)
    stage.cluster.receive(RequestFailed(asked.id, "it ended at once"))
    with pytest.raises(Unable) as caught:
        await starting
    assert caught.value.message == "it ended at once"


async def test_a_process_that_runs_in_the_place_is_taken_over_once(
    stage: Stage, line: Line
) -> None:
    before = stage.certificates.issue("worker", NAME)
    await stage.place(running=Running(9, line.address, "print"))
    child = stage.keep(await stage.start(), 9)
    assert child.address == line.address
    assert not any(isinstance(one, Start) for one in stage.child.sent)
    renewed = stage.certificates.due("worker", NAME)
    assert renewed is not None and renewed != before, "the one that it has is unknown"
    stage.actors.exited(Exited(NAME, 9, 0, None))
    await asyncio.wait_for(asyncio.shield(child.exited), 30)
    again = stage.start()
    asked = await stage.next(Start)
    stage.cluster.receive(RequestFailed(asked.id, "no"))
    with pytest.raises(Unable):
        await again


async def test_certificates_are_renewed_while_a_process_lives(
    stage: Stage, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.place()
    child = await stage.run(line)
    sent: list[object] = []
    monkeypatch.setattr(child, "send", sent.append)
    stage.actors.check()
    assert sent == [], "none is due"
    stage.certificates.forget_certificate("worker", NAME)
    stage.actors.check()
    [renewal] = sent
    assert isinstance(renewal, Renew) and stage.certificates.due("worker", NAME) is None
    stage.certificates.forget_certificate("worker", NAME)
    stage.actors.exited(Exited(NAME, 7, 0, None))
    await asyncio.wait_for(asyncio.shield(child.exited), 30)
    stage.actors.check()
    assert len(sent) == 1


async def test_the_supervisors_own_certificate_is_renewed_too(stage: Stage) -> None:
    own = stage.certificates.own.credentials
    stage.actors.check()
    assert stage.certificates.own.credentials is own
    stage.certificates.forget_certificate("supervisor", "supervisor")
    stage.actors.check()
    assert stage.certificates.own.credentials is not own


# ---------------------------------------------------------------- what a node reports


async def test_lines_are_shown_and_kept_in_the_log(stage: Stage, line: Line) -> None:
    stage.actors.lines(NAME, ("from before",))
    await stage.place()
    stage.actors.lines(NAME, ("it runs not yet",))
    await stage.run(line)
    stage.actors.lines(NAME, ("one", "two"))
    assert stage.lines == ["one", "two"]
    assert (stage.folder / "log").read_text() == "one\ntwo\n"


async def test_figures_are_those_of_the_process_that_runs(stage: Stage, line: Line) -> None:
    own = GpuStatus(1, "GPU-aa", "H200", 100, 40, 0.5)
    stage.actors.measured(Measured(NAME, (own,), 7, {}, 1))
    await stage.place(GPU)
    child = await stage.run(line)
    stage.measured.clear()
    stage.actors.measured(Measured(NAME, (own, OTHER), 7, {"GPU-aa": 30}, rss_bytes=500))
    [found] = stage.measured
    assert [gpu.uuid for gpu in found.own] == ["GPU-aa"]
    assert [one.uuid for one in found.in_use] == ["GPU-aa"] and len(found.gpus) == 2
    assert (found.pid, found.held, child.rss_bytes) == (7, {"GPU-aa": 30}, 500)
    stage.actors.measured(Measured(NAME, (own,), 8, {}, rss_bytes=900))
    assert child.rss_bytes == 500, "of a process before"


# ---------------------------------------------------------------- ends


async def test_how_a_process_has_ended_is_told_with_its_last_lines(
    stage: Stage, line: Line
) -> None:
    await stage.place()
    child = await stage.run(line)
    stage.actors.lines(NAME, ("Thread 0x1 (most recent call first):", '  File "a.py", line 1', "b"))
    stage.actors.exited(Exited("another/0", 7, 1, None))
    stage.actors.exited(Exited(NAME, 7, None, 9, "killed", out_of_memory=True))
    stage.actors.exited(Exited(NAME, 7, 1, None))  # told twice
    exit_ = await asyncio.wait_for(asyncio.shield(child.exited), 30)
    assert (exit_.code, exit_.signal, exit_.out_of_memory) == (None, 9, True)
    assert exit_.tail[-1] == "b"
    assert "killed" in str(exit_)


async def test_the_late_end_of_a_process_before_hides_no_other(stage: Stage, line: Line) -> None:
    await stage.place()
    child = await stage.run(line)
    stage.actors.exited(Exited(NAME, 6, 1, None))
    await asyncio.sleep(0)
    assert not child.exited.done()
    stage.actors.exited(Exited(NAME, 7, 3, None))
    exit_ = await asyncio.wait_for(asyncio.shield(child.exited), 30)
    assert exit_.code == 3


async def test_an_end_may_be_told_before_the_start(stage: Stage, line: Line) -> None:
    await stage.place()
    stage.actors.exited(Exited(NAME, 7, 3, None))
    child = await stage.run(line)
    exit_ = await asyncio.wait_for(asyncio.shield(child.exited), 30)
    assert exit_.code == 3


async def test_the_loss_of_a_node_ends_whatever_runs_there(stage: Stage, line: Line) -> None:
    await stage.place()
    child = await stage.run(line)
    stage.actors.exited(Exited(NAME, 0, None, None, "its node is gone"))
    exit_ = await asyncio.wait_for(asyncio.shield(child.exited), 30)
    assert "its node is gone" in str(exit_)


async def test_a_process_is_killed_with_its_group(stage: Stage, line: Line) -> None:
    await stage.place()
    child = await stage.run(line)
    child.kill("it has stalled")
    assert await stage.next(Signal) == Signal(NAME, signal.SIGKILL, group=True)


async def test_a_process_writes_its_stacks_before_it_is_killed(
    stage: Stage, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.place()
    child = await stage.run(line)
    ending = asyncio.create_task(child.dump_and_kill("it has stalled"))
    assert await stage.next(Signal) == Signal(NAME, signal.SIGUSR2)
    stage.actors.lines(NAME, ("Thread 0x1 (most recent call first):", '  File "a.py", line 1 in f'))
    await ending
    assert await stage.next(Signal) == Signal(NAME, signal.SIGKILL, group=True)
    stage.actors.exited(Exited(NAME, 7, None, 9))
    exit_ = await asyncio.wait_for(asyncio.shield(child.exited), 30)
    assert exit_.stacks[-1].strip() == 'File "a.py", line 1 in f'
