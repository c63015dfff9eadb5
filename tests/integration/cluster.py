"""A gateway and workers that reach each other over TCP, with the test as their supervisor.

    async with Cluster(tmp_path) as cluster:
        worker = await cluster.worker("echo/0", step_s=0.02)
        await cluster.publish()
        await cluster.complete("hello")

All are real processes, as a launcher on several machines starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from servekit.protocol.messages import (
    FromGateway,
    FromWorker,
    Load,
    ModelStatus,
    Ping,
    Pong,
    Ready,
    ReplicaStatus,
    Serving,
    Stop,
    Topology,
    WorkerSpec,
)
from servekit.protocol.transport.certificate_authority import LIFE_S
from servekit.protocol.transport.connection import LOST_S, Connection, adopt_socket
from servekit.protocol.transport.credentials import Renew
from servekit.protocol.transport.tls import Authority, Credentials
from servekit.ray.certificates import Certificates
from servekit.supervisor.lifecycle.remote_process import RemoteChild, RemoteControl
from servekit.supervisor.process.child_process import Exit
from tests.integration.network import Cable
from tests.polling import poll_async

DEADLINE_S = 60.0
MODEL = "echo"


@dataclass(slots=True)
class Node:
    """A worker's process, and what is known of it."""

    name: str
    process: asyncio.subprocess.Process
    address: str
    log_path: Path
    spec: WorkerSpec
    cable: Cable | None = None
    child: RemoteChild[FromWorker] | None = None
    heard: list[FromWorker] = field(default_factory=list)
    pings: int = 0

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def has(self, kind: type) -> bool:
        return any(isinstance(message, kind) for message in self.heard)

    @property
    def wire(self) -> Cable:
        """What it hangs on."""
        assert self.cable is not None
        return self.cable

    async def until_busy(self) -> None:
        """Return once it has said, asked from now on, that it runs a request."""
        asked = self.ping()
        while not self._busy_since(asked):
            await poll_async(f"{self.name} answers", partial(self._answered, self.ping()))

    def ping(self) -> int:
        """Ask it how it is."""
        self.pings += 1
        if self.child is not None:
            self.child.send(Ping(self.pings))
        return self.pings

    def _answered(self, asked: int) -> bool:
        return any(isinstance(one, Pong) and one.seq >= asked for one in self.heard)

    def _busy_since(self, asked: int) -> bool:
        pongs = [one for one in self.heard if isinstance(one, Pong) and one.seq >= asked]
        return any(pong.running for pong in pongs)

    def kill(self) -> None:
        """As when its machine is turned off, for its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _killed(self, cause: str) -> None:
        self.kill()

    async def _ended(self) -> Exit:
        code = await self.process.wait()
        return Exit(code if code >= 0 else None, -code if code < 0 else None, ())

    @property
    def hands(self) -> RemoteControl:
        return RemoteControl(self._killed, self._ended)


class Cluster:
    """`grace_s`, `lost_s` as on the command lines of workers and gateways; all in seconds.

    `life_s` is how long certificates live.
    """

    def __init__(
        self,
        folder: Path,
        *,
        grace_s: float = 60.0,
        lost_s: float = LOST_S,
        node_lost_s: float = DEADLINE_S,
        life_s: float = LIFE_S,
    ) -> None:
        self.authority = Authority.new("test")
        self.certificates = Certificates(self.authority, life_s)
        self.nodes: list[Node] = []
        self.gateway_log = folder / "gateway.log"
        self._folder = folder
        self._grace_s, self._lost_s, self._node_lost_s = grace_s, lost_s, node_lost_s
        self._gateway: subprocess.Popen[bytes] | None = None
        self._control: Connection[FromGateway] | None = None
        self.url = ""

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._control is not None and self._gateway is not None:
            self._control.send(Stop())
            await asyncio.wait_for(self._control.closed, DEADLINE_S)
            await asyncio.to_thread(self._gateway.wait, DEADLINE_S)
        for node in self.nodes:
            node.kill()
            await node.process.wait()
            if node.child is not None:
                node.child.disconnect()
            if node.cable is not None:
                node.cable.remove()

    # ---- workers

    async def worker(
        self,
        name: str,
        *,
        apart: int = 0,
        credentials: Credentials | None = None,
        listen: str = "tcp://0.0.0.0:0",
        args: Sequence[str] = (),
        **options: Any,
    ) -> Node:
        """Start one, on a machine of its own where `apart` is the number of its cable."""
        host = f"10.77.{apart}.2" if apart else "127.0.0.1"
        credentials = credentials or self.certificates.issue("worker", name)
        handed, (reading, writing) = credentials.hand_over(), os.pipe()
        log_path = self._folder / f"{name.replace('/', '-')}.log"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(("unshare", "-n") if apart else ()),
                *(sys.executable, "-m", "servekit.worker", "--name", name),
                *("--listen", listen, "--advertise", host, *args),
                *("--credentials-fd", str(handed), "--report-fd", str(writing)),
                *("--grace-s", str(self._grace_s), "--lost-s", str(self._lost_s)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(handed, writing),
                start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        os.close(handed)
        os.close(writing)
        with os.fdopen(reading) as report:
            line = await asyncio.to_thread(report.readline)
        if not line:
            await process.wait()
            raise AssertionError(log_path.read_text())
        address = json.loads(line)["address"]
        spec = WorkerSpec(
            name, MODEL, "echo", "p", None, "cpu", "auto", 2**21, False, {}, options, address
        )
        # in a thread of this one, which has its network: what runs here is measured
        cable = await asyncio.to_thread(Cable, apart, process.pid) if apart else None
        node = Node(name, process, address, log_path, spec, cable)
        self.nodes.append(node)
        return node

    async def attach(
        self, node: Node, *, load: bool = True, node_lost_s: float | None = None
    ) -> RemoteChild[FromWorker]:
        """Be its supervisor, anew or for the first time; `heard` begins anew, too."""
        heard: list[FromWorker] = []
        node.heard = heard
        node.child = child = RemoteChild[FromWorker](
            node.name,
            node.address,
            self.certificates.own,
            FromWorker,
            heard.append,
            node.hands,
            lost_s=self._lost_s,
            node_lost_s=node_lost_s or self._node_lost_s,
        )
        await child.attach()
        if load:
            child.send(Load(node.spec))
            await poll_async(f"{node.name} is ready", lambda: node.has(Ready))
        return child

    async def ready(self, name: str, **wish: Any) -> Node:
        """A worker that serves."""
        node = await self.worker(name, **wish)
        await self.attach(node)
        return node

    # ---- the gateway

    async def gateway(self, credentials: Credentials | None = None) -> None:
        """Start it, and tell it of the workers there are. It answers on 127.0.0.1."""
        ours, theirs = socket.socketpair()
        public = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{public.getsockname()[1]}"
        handed = (credentials or self.certificates.issue("gateway", "gateway/0")).hand_over()
        fds = (theirs.fileno(), public.fileno(), handed)
        with self.gateway_log.open("wb") as log:
            self._gateway = subprocess.Popen(  # noqa: ASYNC220 - it is waited for in a thread
                [
                    *(sys.executable, "-m", "servekit.gateway", "--name", "gateway/0", "--no-ui"),
                    *("--control-fd", str(fds[0]), "--listen-fd", str(fds[1])),
                    *("--credentials-fd", str(handed), "--lost-s", str(self._lost_s)),
                    *("--parent-pid", str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                start_new_session=True,
            )
        os.close(handed)
        theirs.close()
        public.close()
        heard: list[FromGateway] = []
        self._control = control = Connection[FromGateway](
            FromGateway, heard.append, lambda error: None
        )
        await adopt_socket(ours, lambda: control)
        self.publish()
        await poll_async("the gateway serves", lambda: any(isinstance(m, Serving) for m in heard))

    def publish(self) -> None:
        """Tell the gateway of all workers that there are, as a supervisor does."""
        replicas = tuple(
            ReplicaStatus(node.name, "ready", node.address, node.process.pid, "cpu")
            for node in self.nodes
            if node.process.returncode is None
        )
        assert self._control is not None
        self._control.send(Topology((ModelStatus(MODEL, "echo", "p", 0, replicas),)))

    def renew(self) -> None:
        """Send certificates to whose are due, as a supervisor does; to be called often."""
        self.certificates.renew_due()
        for node in self.nodes:
            due = self.certificates.due("worker", node.name) if node.child is not None else None
            if due is not None and node.child is not None:
                node.child.send(Renew(due))
        if self._control is not None and (due := self.certificates.due("gateway", "gateway/0")):
            self._control.send(Renew(due))

    @property
    def gateway_pid(self) -> int:
        assert self._gateway is not None
        return self._gateway.pid

    @property
    def said(self) -> str:
        """The gateway's log."""
        return self.gateway_log.read_text()

    async def connected(self, count: int) -> None:
        """So many workers have been connected, since the beginning."""
        await poll_async(
            f"{count} workers are connected", lambda: self.said.count("worker_connected") >= count
        )

    async def complete(self, prompt: str, tokens: int) -> str:
        """The text of a stream."""
        return "".join([text async for text in self.stream(prompt, tokens)])

    async def stream(self, prompt: str, tokens: int) -> AsyncIterator[str]:
        """Its pieces, as they come."""
        ask = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True}
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S) as client,
            client.stream("POST", "/v1/completions", json=ask) as answer,
        ):
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    body = json.loads(line[6:])
                    assert "choices" in body, body
                    yield body["choices"][0]["text"]
