"""Gateways of other nodes: which there are, and one of them, a real process, in many situations.

There is no Ray here: who launches them starts the process on this machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.config.schema import ServerConfig
from servekit.config.sections.access import TlsConfig
from servekit.protocol.control.metrics_messages import Figures, Series
from servekit.protocol.control.ray_messages import Node
from servekit.protocol.control.remote_gateway import AdminRequest, AdminResponse
from servekit.protocol.messages import (
    AccessRules,
    ModelStatus,
    ReplicaStatus,
    Stop,
    Topology,
)
from servekit.protocol.transport.certificate_holder import CertificateHolder
from servekit.protocol.transport.tls import Authority
from servekit.ray.actors import StartOrder
from servekit.ray.process.actor import Sockets
from servekit.ray.remote_gateways import RemoteGateway, RemoteGateways, Service, listens_at
from servekit.supervisor.gateway_process import Gateway
from servekit.supervisor.lifecycle.remote_process import RemoteChild, RemoteControl
from servekit.supervisor.process.child_process import Exit
from tests.integration.certificates import make
from tests.unit.gateway.conftest import until
from tests.unit.ray.process.test_actor import free_port
from tests.unit.supervisor.test_gateway_process import Alone

OURS = Authority.new("c")
HEAD, ONE, TWO = (Node(f"id-{host}", host) for host in ("10.0.0.1", "127.0.0.2", "127.0.0.3"))
DEADLINE_S = 60.0


# ---------------------------------------------------------------- where they are to be


@pytest.mark.parametrize(
    ("host", "found"),
    [("0.0.0.0", "0.0.0.0"), ("::", "::"), ("10.0.0.1", "10.0.0.2"), ("head", "10.0.0.2")],
)
def test_one_address_of_ours_is_there_the_nodes_own(host: str, found: str) -> None:
    assert listens_at(host, "10.0.0.2") == found


# ---------------------------------------------------------------- one of them


class Cluster:
    """The nodes that there are."""

    def __init__(self) -> None:
        self.nodes: tuple[Node, ...] = (HEAD,)
        self.own = HEAD.node
        self.on_nodes: Callable[[], None] = lambda: None

    def have(self, *nodes: Node) -> None:
        self.nodes = (HEAD, *nodes)
        self.on_nodes()


class Actors:
    """Starts gateways as their actors do, or finds those that a supervisor before has left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.doors = Sockets()
        self.refusal = ""
        self.orders: list[Any] = []
        self.left: tuple[int, str] | None = None  # PID and address of one that runs
        self.processes: list[subprocess.Popen[bytes]] = []

    async def enter(self, name: str, wait: object, wish: Callable[[int], Any]) -> str:
        self.orders.append(wish(1))
        return self.refusal

    async def start_process(
        self, name: str, order: StartOrder, incoming: Any, on_message: Any, on_line: Any
    ) -> RemoteChild[Any]:
        if self.left is None:
            self.left = await asyncio.to_thread(self._start, name, order)
        pid, address = self.left

        async def kill(cause: str) -> None:
            os.kill(pid, signal.SIGKILL)

        async def exited() -> Exit:
            [process] = [one for one in self.processes if one.pid == pid]
            code = await asyncio.to_thread(process.wait)
            self.left = None
            return Exit(code, None, ()) if code >= 0 else Exit(None, -code, ())

        own = CertificateHolder(OURS.issue("supervisor", "supervisor"))
        hands = RemoteControl(kill, exited)
        child = RemoteChild[Any](name, address, own, incoming, on_message, hands, role="gateway")
        return await child.attach()

    def _start(self, name: str, order: StartOrder) -> tuple[int, str]:
        listening = self.doors.open_sockets(order.listen)
        credentials = OURS.issue(order.role, name, is_dialled=True)
        secret, (reports, report) = credentials.hand_over(), os.pipe()
        fds = ["--credentials-fd", str(secret), "--report-fd", str(report)]
        fds += [arg for fd in listening for arg in ("--listen-fd", str(fd))]
        fds += ["--parent-pid", str(os.getpid())]
        with (self._folder / "gateway.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"servekit.{order.role}", *order.args, *fds],
                env={**os.environ, **order.env},
                stdout=log,
                stderr=log,
                pass_fds=(secret, report, *listening),
            )
        self.processes.append(process)
        os.close(secret)
        os.close(report)
        with os.fdopen(reports) as lines:
            address = json.loads(lines.readline())["address"]
        return process.pid, address

    async def release_place(self, name: str) -> None:
        self.doors.open_sockets(())

    def end(self) -> None:
        self.doors.open_sockets(())
        for process in self.processes:
            process.kill()
            process.wait()


class Launcher:
    """As `ray.RayLauncher`, without Ray."""

    grace_s = 60.0
    cluster_authority = b"ours"
    gateways_everywhere = True

    def __init__(self, folder: Path) -> None:
        self.cluster, self.actors = Cluster(), Actors(folder)

    async def fault(self, node: Node) -> str:
        return node.problem


class AdminAnswers:
    """Answers all questions with the same figure."""

    def answer_remote(self, asked: AdminRequest, send: Callable[[AdminResponse], None]) -> None:
        send(AdminResponse(asked.id, Figures((Series("servekit_model_ready", ("m",), [1.0]),))))


class Stage:
    """An instance that has gateways and nothing else."""

    def __init__(self, folder: Path, launcher: Launcher, server: ServerConfig, port: int) -> None:
        self.host = Alone(folder / "run")
        service: Any = Service(server, (port,), launcher, AdminAnswers())  # type: ignore[arg-type]
        self.gateways = [Gateway(0, (), server, self.host, lambda spent: None)]
        self.lives: list[asyncio.Task[None]] = []
        self.all = RemoteGateways(self.gateways, service, self.host, self._run)

    def _run(self, life: Any) -> None:
        self.lives.append(asyncio.create_task(life.supervise()))

    @property
    def remote(self) -> list[RemoteGateway]:
        return [one for one in self.gateways if isinstance(one, RemoteGateway)]

    def say(self, topology: Topology) -> None:
        for gateway in self.gateways:
            gateway.publish(topology)

    async def end(self) -> None:
        self.all.stop_starting()
        for one in self.remote:
            one.end_child(Stop(), 5.0)
        await asyncio.gather(*self.lives)
        self.host.run_dir.unlock()

    async def leave(self) -> None:
        """As one that is killed: what it has started goes on."""
        for task in self.lives:
            task.cancel()
        for one in self.remote:
            if isinstance(one.child, RemoteChild):
                one.child.disconnect()
        await asyncio.gather(*self.lives, return_exceptions=True)
        self.host.run_dir.unlock()


@asynccontextmanager
async def staged(
    folder: Path, launcher: Launcher, port: int, **server: Any
) -> AsyncIterator[Stage]:
    stage = Stage(folder, launcher, ServerConfig(ui=False, host=HEAD.host, **server), port)
    stage.all.start_all()
    try:
        yield stage
    finally:
        await stage.end()


@pytest.fixture
def launcher(tmp_path: Path) -> Any:
    made = Launcher(tmp_path)
    yield made
    made.actors.end()


def model(name: str, state: Any = "ready") -> ModelStatus:
    worker = ReplicaStatus(f"{name}/0", state, "tcp://127.0.0.1:1", 1, "cpu")
    return ModelStatus(name, "echo", "p", 0, (worker,))


async def models(port: int, *, host: str = ONE.host) -> list[str]:
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        answer = await client.get(f"http://{host}:{port}/v1/models")
    return [one["id"] for one in answer.json()["data"]]


async def test_it_serves_what_it_is_told_and_asks_for_what_it_is_asked(
    tmp_path: Path, launcher: Launcher
) -> None:
    port = free_port()
    async with staged(tmp_path, launcher, port) as stage:
        stage.say(Topology((model("m"),)))
        launcher.cluster.have(ONE)
        [gateway] = stage.remote
        await until(lambda: gateway.state == "ready")
        assert (gateway.name, gateway.status().node) == (f"gateway/{ONE.host}", ONE.host)
        assert await models(port) == ["m"]
        stage.say(Topology((model("m"), model("n"))))
        await until(lambda: gateway.is_up_to_date)
        assert await models(port) == ["m", "n"]
        async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
            page = await client.get(f"http://{ONE.host}:{port}/metrics")
        assert 'servekit_model_ready{model="m"} 1.0' in page.text
    assert launcher.actors.orders[0].node == ONE.node
    assert [process.wait() for process in launcher.actors.processes] == [0]


async def test_one_that_dies_is_started_again_and_its_port_stays(
    tmp_path: Path, launcher: Launcher
) -> None:
    port = free_port()
    async with staged(tmp_path, launcher, port) as stage:
        stage.say(Topology((model("m"),)))
        launcher.cluster.have(ONE)
        [gateway] = stage.remote
        await until(lambda: gateway.state == "ready")
        os.kill(gateway.pid, signal.SIGKILL)
        assert await models(port) == ["m"]  # who comes meanwhile waits
        await until(lambda: gateway.state == "ready" and gateway.restarts == 1)
        assert "SIGKILL" in gateway.reason


async def test_one_that_is_adopted_goes_by_the_old_word_until_the_new_one_is_whole(
    tmp_path: Path, launcher: Launcher
) -> None:
    port = free_port()
    first = Stage(tmp_path, launcher, ServerConfig(ui=False, host=HEAD.host), port)
    launcher.cluster.nodes = (HEAD, ONE)
    first.say(Topology((model("m"),)))
    first.all.start_all()
    await until(lambda: first.remote[0].state == "ready")
    pid = first.remote[0].pid
    await first.leave()
    assert await models(port) == ["m"]
    async with staged(tmp_path, launcher, port) as second:
        [gateway] = second.remote
        await until(lambda: gateway.state == "ready")
        assert (gateway.pid, gateway.restarts) == (pid, 0)
        second.say(Topology((model("n", "loading"),)))
        assert not gateway.is_up_to_date
        assert await models(port) == ["m"]
        second.say(Topology((model("n"),)))
        await until(lambda: gateway.is_up_to_date)
        assert await models(port) == ["n"]


async def test_it_is_handed_the_certificate_and_each_new_one(
    tmp_path: Path, launcher: Launcher
) -> None:
    port, tls = free_port(), TlsConfig(certificate=tmp_path / "x.pem", key=tmp_path / "x.key")
    make(tmp_path, "x", addresses=[ONE.host])
    async with staged(tmp_path, launcher, port, tls=tls) as stage:
        stage.say(Topology((model("m"),), access=AccessRules(certificate="1")))
        launcher.cluster.have(ONE)
        [gateway] = stage.remote
        await until(lambda: gateway.state == "ready")
        for stamp in ("2", "3"):
            async with httpx.AsyncClient(timeout=DEADLINE_S, verify=trust(tmp_path)) as client:
                answer = await client.get(f"https://{ONE.host}:{port}/livez")
            assert answer.status_code == 200
            make(tmp_path, "x", addresses=[ONE.host])  # another one
            stage.say(Topology((model("m"),), access=AccessRules(certificate=stamp)))
            await until(lambda: gateway.is_up_to_date)


def trust(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "x.pem"))


# ---------------------------------------------------------------- as nodes come and go


async def test_they_come_and_go_with_their_nodes(tmp_path: Path, launcher: Launcher) -> None:
    launcher.actors.refusal = "no actor today"
    async with staged(tmp_path, launcher, free_port()) as stage:
        assert stage.gateways == stage.gateways[:1]
        launcher.cluster.have(ONE, TWO)
        assert [one.name for one in stage.remote] == [f"gateway/{n.host}" for n in (ONE, TWO)]
        assert not any(one.shares for one in stage.remote)
        await until(lambda: stage.remote[0].state == "backoff")
        assert f"on the node {ONE.host}: no actor today" in stage.remote[0].reason
        gone = stage.remote[0]
        gone._past_tokens["m"] = 5
        launcher.cluster.have(TWO)
        await until(lambda: gone not in stage.gateways)
        assert [one.name for one in stage.remote] == [f"gateway/{TWO.host}"]
        assert stage.gateways[0].generated_tokens("m") == 5
        anew = Node("started-again", TWO.host)
        launcher.cluster.have(anew)
        assert [one.node for one in stage.remote] == [anew]
        stage.all.stop_starting()
        launcher.cluster.have(anew, ONE)
        assert len(stage.remote) == 1


async def test_a_node_that_is_back_before_its_gateway_has_ended_gets_another(
    tmp_path: Path, launcher: Launcher
) -> None:
    launcher.actors.refusal = "no actor today"
    async with staged(tmp_path, launcher, free_port()) as stage:
        launcher.cluster.have(ONE)
        [first] = stage.remote
        launcher.cluster.have()
        assert first.ending
        launcher.cluster.have(ONE)
        await until(lambda: stage.remote != [first] and len(stage.remote) == 1)
        assert not stage.remote[0].ending
