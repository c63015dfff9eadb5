"""A gateway process, as the supervisor manages it."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from servekit.config.schema import ServerConfig
from servekit.protocol.adapters import AdapterUnused, TopologyApplied
from servekit.protocol.control.metrics_messages import Counted, Series
from servekit.protocol.messages import (
    FromGateway,
    GatewayStatus,
    KeyBudgets,
    KeyUsage,
    Ping,
    Quarantined,
    Serving,
    SourceReport,
    Topology,
    Traffic,
)
from servekit.protocol.residency import KeepAlive, ModelDemand
from servekit.protocol.transport.credentials import Renew
from servekit.protocol.transport.socket_handover import heir_path
from servekit.request_log import file_of
from servekit.supervisor.lifecycle.exit_history import StartReason
from servekit.supervisor.lifecycle.managed_process import ManagedProcess, SupervisorContext
from servekit.supervisor.process import environment
from servekit.supervisor.process.child_process import Command
from servekit.supervisor.quarantine import aged

log: Any = structlog.get_logger("servekit.supervisor")

#: The longest wait for gateways to apply a new topology.
_TELL_S = 2.0
_LOOK_EVERY_S = 0.005
#: The interval of pings to a gateway, and the silence after which the gateway is replaced.
_ASK_EVERY_S = 1.0
SILENT_S = 30.0
#: Deaths of the same cause, before any gateway has served, after which the start has failed.
_DEATHS_IN_VAIN = 5


class Gateway(ManagedProcess[FromGateway]):
    """A gateway process on the shared listening sockets."""

    incoming = FromGateway
    begins_with = "imports"

    def __init__(
        self,
        which: int | str,
        listen_fds: tuple[int, ...],
        server: ServerConfig,
        host: SupervisorContext,
        tell_others: Callable[[KeyUsage | SourceReport], None],
    ) -> None:
        super().__init__(f"gateway/{which}", host)
        self.starting.occasion = StartReason.from_supervisor_start()
        self.has_served = False  # in any of its lives
        self.traffic = Traffic(0, 0, {})
        self._past_tokens: Counter[str] = Counter()  # tokens of its earlier lives
        self._tell_others = tell_others
        self._which, self._listen_fds = which, listen_fds
        self._server = server
        self._topology, self._published_s = Topology(()), time.monotonic()
        self._budgets = KeyBudgets()
        self._sent = self._told = 0  # serial numbers of topologies
        self._asked_at = self.answered_at = 0.0  # on the monotonic clock
        self._credentials_fd: int | None = None  # until the gateway has them
        self._unused: set[str] = set()  # adapters withdrawn from service that no request there uses
        #: The demand for each model that is loaded on demand, and when it was reported.
        self.uses: dict[str, tuple[ModelDemand, float]] = {}
        self.on_use: Callable[[KeepAlive | None], None] = lambda _: None
        self.on_counted: Callable[[Counted], None] = lambda _: None

    def join(self, other: Gateway) -> None:
        """Copy the callbacks and the topology of an existing gateway."""
        self.on_use, self.on_counted = other.on_use, other.on_counted
        self._tell_others, self._topology = other._tell_others, other._topology

    def succeed(self, other: Gateway) -> None:
        """Take over the token counts of a gateway that is gone."""
        self._past_tokens.update(other._past_tokens)

    @property
    def shares(self) -> bool:
        """Return whether the gateway takes a share of the workers' slots."""
        return True

    def command(self) -> Command:
        self._forget_credentials()
        if self.host.launcher is not None:
            self._credentials_fd = self.host.launcher.gateway_credentials(self.name).hand_over()
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
                *("--request-log", str(file_of(self.host.run_dir.path, self.name))),
                *("--responses", str(self.host.run_dir.path / "responses.db")),
                *(("--legacy",) if self._server.legacy else ()),
                *self._remote_args(),
            ),
            env=environment.for_gateway(self.host.environ, self.host.mark),
            # The dash: a model may be called "gateway", and its workers' files have a "~".
            log_path=self.host.run_dir.log_path(self.name.replace("/", "-")),
            pass_fds=self._listen_fds + self._credentials_fds(),
        )

    def _remote_args(self) -> tuple[str, ...]:
        """Return the arguments that let a gateway outlive its supervisor, as remote workers do."""
        if self.host.launcher is None:
            return ()
        heir = heir_path(self.host.run_dir.path, self._which)
        return (
            *("--credentials-fd", str(self._credentials_fd)),
            *("--heir", str(heir), "--grace-s", f"{self.host.launcher.grace_s:g}"),
        )

    def _credentials_fds(self) -> tuple[int, ...]:
        return () if self._credentials_fd is None else (self._credentials_fd,)

    def _forget_credentials(self) -> None:
        if self._credentials_fd is not None:
            os.close(self._credentials_fd)
        self._credentials_fd = None

    def _ui_args(self) -> tuple[str, ...]:
        # Gradio keeps state in its process, so the first gateway serves the UI for all.
        if not self._server.ui:
            return ("--no-ui",)
        return ("--ui-socket", str(self.host.run_dir.path / "ui.sock"))

    def _tls_args(self) -> tuple[str, ...]:
        if (tls := self._server.tls) is None:
            return ()
        return ("--tls-certificate", str(tls.certificate), "--tls-key", str(tls.key))

    def send_greeting(self) -> None:
        self._forget_credentials()
        passed_s = time.monotonic() - self._published_s
        held = aged(self._topology.quarantined, passed_s)
        self.publish(replace(self._topology, quarantined=held))
        if self.child is not None and self._budgets.spent:
            self.child.send(self._budgets)

    def publish(self, topology: Topology) -> None:
        """Send the topology; a later incarnation of the gateway gets it first."""
        self._topology, self._published_s = topology, time.monotonic()
        self._unused -= {
            adapter.name
            for model in topology.models
            for adapter in model.adapters
            if adapter.state == "serving"
        }
        self._sent += 1
        if self.child is not None:
            self.child.send(replace(topology, serial=self._sent))

    def publish_budgets(self, budgets: KeyBudgets) -> None:
        """Send the budgets that are used up, if they have changed."""
        if budgets != self._budgets:
            self._budgets = budgets
            if self.child is not None:
                self.child.send(budgets)

    @property
    def is_up_to_date(self) -> bool:
        """Return whether the gateway, if it serves, has applied the last topology."""
        return self.state != "ready" or self._told == self._sent

    def is_done_with(self, adapter: str) -> bool:
        """Return whether the gateway has no request left for a withdrawn adapter."""
        return self.state != "ready" or adapter in self._unused

    def forward_report(self, report: KeyUsage | SourceReport) -> None:
        """Forward the report of another gateway: its key usage, or its suspect sources."""
        if report.gateway != self.name and self.child is not None:
            self.child.send(report)

    def receive(self, message: FromGateway) -> None:
        self.answered_at = time.monotonic()
        match message:
            case Serving():
                took_s = round(time.monotonic() - self._began_at, 2)
                log.info("gateway_ready", child=self.name, after_s=took_s)
                self.has_served = True
                self.mark_ready()
            case Quarantined():
                self.host.quarantine(message)
                one = Series("servekit_quarantines_total", (message.model,), [1])
                self.on_counted(Counted((one,)))
            case Counted():
                self.on_counted(message)
            case TopologyApplied(serial):
                self._told = serial
            case AdapterUnused(adapter):
                self._unused.add(adapter)
            case KeyUsage() | SourceReport():
                self._tell_others(message)
            case ModelDemand(model):
                self.uses[model] = message, time.monotonic()
                self.on_use(None)
            case KeepAlive():
                self.on_use(message)
            case Traffic():
                self.traffic = message
                self.host.publish_later()

    def check_health(self) -> None:
        """Ping the gateway, and replace it if it does not answer. The other gateways serve on."""
        super().check_health()
        now = time.monotonic()
        if self.state != "ready" or self.child is None:
            return
        launcher = self.host.launcher
        if launcher is not None and (due := launcher.renewed(self.name)) is not None:
            self.child.send(Renew(due))
        silent_s = self.silent_s
        if silent_s > SILENT_S:
            self.kill_stalled(f"it did not answer for {SILENT_S:g} s, killed")
        elif not silent_s and now - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = now
            self.child.send(Ping(0))

    def forgive_suspension(self) -> None:
        """Restart the silence timer: the supervisor was suspended and could read no answer."""
        self._asked_at = self.answered_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        owes = self.state == "ready" and self.answered_at < self._asked_at
        return time.monotonic() - self._asked_at if owes else 0.0

    def load(self) -> tuple[int, int]:
        return self.traffic.requests, self.traffic.in_flight

    def awaited_models(self) -> set[str]:
        """Return the models that requests wait for, by the gateway's last report."""
        queued = {name for name, count in self.traffic.queued.items() if count}
        return queued | {name for name, (wanted, _) in self.uses.items() if wanted.waiting}

    def generated_tokens(self, model: str) -> int:
        """Return the tokens it has generated for `model`, in all its lives."""
        return self._past_tokens[model] + self.traffic.tokens.get(model, 0)

    def forget_child(self) -> None:
        self._past_tokens.update(self.traffic.tokens)
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
            reason=self.reason,
        )


def gateways_of(
    server: ServerConfig, listen_fds: tuple[int, ...], host: SupervisorContext
) -> list[Gateway]:
    """Return an instance's gateways, each of which forwards its news to the others."""
    gateways: list[Gateway] = []

    def tell_others(news: KeyUsage | SourceReport) -> None:
        for gateway in gateways:
            gateway.forward_report(news)

    for index in range(server.gateways):
        gateways.append(Gateway(index, listen_fds, server, host, tell_others))
    return gateways


def in_vain(gateways: Sequence[Gateway]) -> str:
    """Return why the start has failed, or "".

    It has failed when no gateway has ever served and one keeps dying of the same cause.
    """
    if any(gateway.has_served for gateway in gateways):
        return ""
    for gateway in gateways:
        causes = [death.what for death in gateway.history.exits()[-_DEATHS_IN_VAIN:]]
        if len(causes) == _DEATHS_IN_VAIN and len(set(causes)) == 1:
            log_file = gateway.host.run_dir.log_path(gateway.name.replace("/", "-"))
            return f"no gateway can serve. {gateway.name}: {causes[0]} (more in {log_file})"
    return ""


async def until_told(gateways: Sequence[Gateway]) -> None:
    """Wait until all gateways have applied the topology, with the changes of this event-loop tick.

    Gives up on a gateway that takes longer than 2 s.
    """
    deadline = time.monotonic() + _TELL_S
    while time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_EVERY_S)  # the topology is published within this tick
        if all(gateway.is_up_to_date for gateway in gateways):
            return
