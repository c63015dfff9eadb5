"""A real worker's inside in this process: echo engine, runner and socket, ready to be killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.engines.api.base import StepOutput
from servekit.engines.echo.engine import EchoEngine
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import (
    ModelStatus,
    Quarantined,
    ReplicaStatus,
    SourceReport,
    Topology,
    WorkerSpec,
    WorkerState,
)
from servekit.protocol.transport.connection import listen_at
from servekit.worker.runner import Runner
from tests.polling import poll_async

DEADLINE_S = 60.0
#: With these options, and as many tokens asked for, an echo worker does not end a request itself.
ENDLESS: dict[str, Any] = {"step_s": 0.002, "max_context": 10**8}
ENDLESS_TOKENS = 10**7


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Let the loop run until the condition holds."""
    await poll_async(what, condition, DEADLINE_S)


class EchoWorker:
    """One worker at a socket; `kill` is what SIGKILL looks like from a gateway."""

    def __init__(self, path: Path, said: dict[str, Any] | None = None, **options: Any) -> None:
        """`said` are further fields of its spec."""
        self.path = path
        spec = WorkerSpec(
            path.stem, "m", "echo", "-", None, "cpu", "auto", None, False, {}, options, str(path)
        )
        self.engine = EchoEngine(replace(spec, **(said or {})))
        info = self.engine.load(lambda progress: None)
        self.runner = Runner(self.engine, info, on_idle=lambda: None)
        self.steps: list[StepOutput] = []

    async def start(self) -> None:
        self.engine.start(self._emit)
        self._server = await listen_at(self.path, self.runner.connect)

    def _emit(self, outputs: Any) -> None:
        self.steps += outputs
        self.runner.emit(outputs)

    def record_requests(self) -> list[Any]:
        """Return a list that the worker's requests are added to from now on."""
        seen: list[Any] = []
        accept = self.runner.accept

        def watching(peer: Any, request: Any) -> None:
            seen.append(request)
            accept(peer, request)

        self.runner.accept = watching  # type: ignore[method-assign]
        return seen

    @property
    def running(self) -> int:
        now = self.engine.load_now()
        return now.running + now.waiting

    def kill(self) -> None:
        self._server.close()
        for peer in list(self.runner.peers):
            peer.connection.abort()
        self.engine.close()

    def status(self, state: WorkerState = "ready", reason: str = "") -> ReplicaStatus:
        return ReplicaStatus(self.path.stem, state, str(self.path), 1, "cpu", reason=reason)


class Service:
    """A router and the workers it is told of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[Quarantined] = []
        self.news: list[SourceReport] = []
        self.router = Router("gateway/test", self._keep)
        self.workers: list[EchoWorker] = []
        self.scripted = 0  # how many scripted ones there have been
        self.max_queue = 100
        self.timeout_s = 3600.0  # longer than any test: nothing is ended by it unasked

    def _keep(self, report: Quarantined | SourceReport) -> None:
        if isinstance(report, Quarantined):
            self.reports.append(report)
        else:
            self.news.append(report)

    async def worker(self, **options: Any) -> EchoWorker:
        worker = EchoWorker(self.folder / f"w{len(self.workers)}.sock", **options)
        self.workers.append(worker)
        await worker.start()
        return worker

    def tell(
        self,
        *replicas: ReplicaStatus,
        draining: bool = False,
        gateways: int = 1,
        changing: bool = False,
    ) -> None:
        status = ModelStatus(
            "m",
            "echo",
            "-",
            0,
            replicas,
            aliases=("alias",),
            timeout_s=self.timeout_s,
            max_queue=self.max_queue,
            changing=changing,
        )
        self.router.apply_topology(Topology((status,), draining, gateways))

    async def up(self, count: int = 1, **options: Any) -> list[EchoWorker]:
        """Start workers, tell the router, and wait until it has reached them all."""
        workers = [await self.worker(**options) for _ in range(count)]
        self.tell(*(worker.status() for worker in workers))
        route = self.router.routes["m"]
        await until(lambda: sum(r.routable for r in route.replicas.values()) == count)
        return workers

    def stop(self) -> None:
        self.tell()
        for worker in self.workers:
            worker.kill()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(tmp_path)
    yield service
    service.stop()
