"""One gateway, as the supervisor sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from servekit.config.schema import ServerConfig
from servekit.supervisor import environment
from servekit.supervisor.child import Command
from servekit.supervisor.life import Host, Life
from servekit.wire.adapters import Told, Unused
from servekit.wire.messages import (
    FromGateway,
    GatewayStatus,
    Quarantined,
    Serving,
    Spent,
    Topology,
    Traffic,
)
from servekit.wire.residency import KeepAlive, Wanted

log: Any = structlog.get_logger("servekit.supervisor")

#: How long a gateway may take to hear of a change, before it is gone on without it.
_TELL_S = 2.0
_LOOK_EVERY_S = 0.005


class Gateway(Life[FromGateway]):
    """Runs one gateway on the shared listening sockets."""

    incoming = FromGateway

    def __init__(
        self,
        index: int,
        listen_fds: tuple[int, ...],
        server: ServerConfig,
        host: Host,
        tell_others: Callable[[Spent], None],
    ) -> None:
        super().__init__(f"gateway/{index}", host)
        self.traffic = Traffic(0, 0, {})
        self._tell_others = tell_others
        self._listen_fds = listen_fds
        self._server = server
        self._topology = Topology(())
        self._sent = self._told = 0  # serial numbers of topologies
        self._unused: set[str] = set()  # adapters that serve no more, and have no requests there
        #: How much each model that comes and goes is in use there, and when that was said.
        self.uses: dict[str, tuple[Wanted, float]] = {}
        self.on_use: Callable[[KeepAlive | None], None] = lambda _: None

    def command(self) -> Command:
        return Command(
            name=self.name,
            module="servekit.gateway",
            args=(
                *("--name", self.name),
                *(arg for fd in self._listen_fds for arg in ("--listen-fd", str(fd))),
                *("--max-body-bytes", str(self._server.max_body_bytes)),
                *self._tls_args(),
                *self._ui_args(),
                *("--operators", str(self.host.run_dir.control)),
                *(("--legacy",) if self._server.legacy else ()),
            ),
            env=environment.for_gateway(self.host.environ, self.host.mark),
            # A model may be called "gateway"; its workers' files have a "~".
            log_path=self.host.run_dir.log_path(self.name.replace("/", "-")),
            pass_fds=self._listen_fds,
        )

    def _ui_args(self) -> tuple[str, ...]:
        # Gradio keeps state in its process, so the first gateway serves the UI for all.
        if not self._server.ui:
            return ("--no-ui",)
        return ("--ui-socket", str(self.host.run_dir.path / "ui.sock"))

    def _tls_args(self) -> tuple[str, ...]:
        if (tls := self._server.tls) is None:
            return ()
        return ("--tls-certificate", str(tls.certificate), "--tls-key", str(tls.key))

    def greet(self) -> None:
        self.publish(self._topology)

    def publish(self, topology: Topology) -> None:
        """Tell it where everything is; a later incarnation is told first thing."""
        self._topology = topology
        self._unused -= {
            adapter.name
            for model in topology.models
            for adapter in model.adapters
            if adapter.state == "serving"
        }
        self._sent += 1
        if self.child is not None:
            self.child.send(replace(topology, serial=self._sent))

    @property
    def is_up_to_date(self) -> bool:
        """It serves by what was published last, if it serves."""
        return self.state != "ready" or self._told == self._sent

    def is_done_with(self, adapter: str) -> bool:
        """It has no request for an adapter that serves no more."""
        return self.state != "ready" or adapter in self._unused

    def hear(self, spent: Spent) -> None:
        """Tell it what keys have used at another gateway."""
        if spent.gateway != self.name and self.child is not None:
            self.child.send(spent)

    def receive(self, message: FromGateway) -> None:
        match message:
            case Serving():
                took_s = round(time.monotonic() - self._began_at, 2)
                log.info("serving", child=self.name, after_s=took_s)
                self.came_up()
            case Quarantined():
                self.host.quarantine(message)
            case Told(serial):
                self._told = serial
            case Unused(adapter):
                self._unused.add(adapter)
            case Spent():
                self._tell_others(message)
            case Wanted(model):
                self.uses[model] = message, time.monotonic()
                self.on_use(None)
            case KeepAlive():
                self.on_use(message)
            case Traffic():
                self.traffic = message
                self.host.changed()

    def load(self) -> tuple[int, int]:
        return self.traffic.requests, self.traffic.in_flight

    def buried(self) -> None:
        self.traffic = Traffic(0, 0, {})
        self._unused.clear()
        self.uses.clear()

    def status(self) -> GatewayStatus:
        return GatewayStatus(
            name=self.name,
            pid=self.pid,
            state=self.state,
            restarts=self.restarts,
            rss_bytes=self.rss_bytes,
            requests=self.traffic.requests,
            in_flight=self.traffic.in_flight,
        )


async def until_told(gateways: Sequence[Gateway]) -> None:
    """Return when all of them go by what was published, changes of this turn of the loop included.

    One that takes long is not waited for.
    """
    deadline = time.monotonic() + _TELL_S
    while time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_EVERY_S)  # in this turn of the loop they are told
        if all(gateway.is_up_to_date for gateway in gateways):
            return
