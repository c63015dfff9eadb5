"""Gateways on the other nodes of a cluster: one on each, as nodes join and leave.

They work like the supervisor's own gateways, but start differently: a Ray actor holds the listening
sockets on its node and starts the process, which the supervisor reaches over TCP. They outlive the
supervisor like workers, and the next supervisor takes them over.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from msgspec.structs import replace

from servekit import __version__
from servekit.config.schema import ServerConfig
from servekit.protocol.control.ray_messages import Node, PlaceWorker
from servekit.protocol.control.remote_gateway import (
    AdminRequest,
    AdminResponse,
    CertificateUpdate,
    FromRemoteGateway,
)
from servekit.protocol.messages import FromGateway, GatewayStatus, Stop, Topology
from servekit.ray import bootstrap
from servekit.ray.actors import StartOrder
from servekit.ray.client import Unable
from servekit.ray.launcher import RayLauncher
from servekit.ray.node_requirements import sites_of
from servekit.ray.takeover import PATIENCE_S
from servekit.supervisor.gateway_process import Gateway
from servekit.supervisor.lifecycle.managed_process import ManagedProcess, SupervisorContext
from servekit.supervisor.lifecycle.remote_process import AnyChild
from servekit.supervisor.process import environment

if TYPE_CHECKING:
    from servekit.supervisor.admin.control_socket import AdminApi

log: Any = structlog.get_logger("servekit.supervisor")

#: Time for the gateway of a lost node to shut down, if it is still alive.
_LOST_S = 1.0
_EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Service:
    """Settings and services that all remote gateways share."""

    server: ServerConfig
    ports: tuple[int, ...]  # the public one first
    launcher: RayLauncher
    admin_api: AdminApi


class RemoteGateway(Gateway):
    """Gateway of one node, identified by its address."""

    incoming = FromRemoteGateway

    def __init__(
        self, node: Node, service: Service, host: SupervisorContext, beside: Gateway
    ) -> None:
        super().__init__(node.host, (), service.server, host, lambda spent: None)
        self.node = node  # a restarted machine is a new node for Ray
        self._service = service
        self._certified = ""  # stamp of its current certificate
        self._holds_until = 0.0  # until then it keeps the last supervisor's topology
        self.on_over: Callable[[RemoteGateway], None] = lambda _: None
        self.join(beside)

    # ---- place

    async def acquire_resources(self) -> str:
        node, berths = self.node, self._service.launcher.actors
        mark = self._fingerprint()
        refusal = await self._service.launcher.fault(node) or await berths.enter(
            self.name,
            lambda what: None,
            lambda id: PlaceWorker(id, self.name, "", 0, 0.0, "PACK", mark, node.node),
        )
        return f"on the node {node.host}: {refusal}" if refusal else ""

    async def spawn(self) -> AnyChild[FromGateway]:
        order = StartOrder(
            args=self._args(),
            env=self._environment(),
            fingerprint=self._fingerprint(),
            log_path=self.host.run_dir.log_path(self.name.replace("/", "-")),
            role="gateway",
            listen=self._listen(),
        )
        try:
            child = await self._service.launcher.actors.start_process(
                self.name, order, self.incoming, self.receive, self._on_line
            )
        except Unable as error:
            raise Unable(f"on the node {self.node.host}: {error.message}") from None
        child.on_again = self._republish
        return child

    async def supervise(self) -> None:
        await super().supervise()
        await self._service.launcher.actors.release_place(self.name)
        self.on_over(self)

    def _args(self) -> tuple[str, ...]:
        server, here = self._service.server, self.node.host
        return (
            *("--name", self.name),
            *("--control", f"tcp://{bootstrap.any_address(here)}:0", "--advertise", here),
            *("--max-body-bytes", str(server.max_body_bytes)),
            *("--grace-s", f"{self._service.launcher.grace_s:g}"),
            *(("--tls-handed",) if server.tls else ()),
            *(() if server.ui else ("--no-ui",)),
            *(("--legacy",) if server.legacy else ()),
        )

    def _environment(self) -> dict[str, str]:
        env = environment.for_gateway({}, "")
        return {name: env[name] for name in env if name not in environment.OF_THIS_MACHINE}

    def _listen(self) -> tuple[tuple[str, int], ...]:
        address = listens_at(self._service.server.host, self.node.host)
        return tuple((address, port) for port in self._service.ports)

    def _fingerprint(self) -> str:
        authority = self._service.launcher.cluster_authority
        parts = (self._args(), self._listen(), __version__, authority)
        return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()

    # ---- messages to the gateway

    def send_greeting(self) -> None:
        adopted = self.child is not None and getattr(self.child, "state", "") == "ready"
        self._holds_until = time.monotonic() + PATIENCE_S if adopted else 0.0
        self._certified = ""
        super().send_greeting()

    def _republish(self) -> None:
        """Publish again after a reconnection, since messages may have been lost."""
        self._certified = ""
        self.publish(self._topology)

    def publish(self, topology: Topology) -> None:
        """Publish a topology; a gateway that was taken over first keeps the previous one.

        It changes once this supervisor has found the workers again, so that it does not lose them
        in between.
        """
        if self._holds_until and not self._may_change(topology):
            self._topology = topology
            return
        self._holds_until = 0.0
        self._certify(topology.access.certificate)
        super().publish(topology)

    def _may_change(self, topology: Topology) -> bool:
        late = time.monotonic() >= self._holds_until
        return late or topology.draining or _is_whole(topology)

    @property
    def is_up_to_date(self) -> bool:
        return super().is_up_to_date and not self._holds_until

    @property
    def shares(self) -> bool:
        return self.child is not None

    def _certify(self, stamp: str) -> None:
        """Send the certificate and its key, which are files on our machine."""
        tls = self._service.server.tls
        if tls is None or self.child is None or stamp == self._certified:
            return
        try:
            files = tls.certificate.read_bytes(), tls.key.read_bytes()
        except OSError as error:  # it was readable a moment ago
            log.error("certificate_unreadable", child=self.name, reason=str(error))
            return
        self._certified = stamp
        self.child.send(CertificateUpdate(stamp, *files))

    # ---- messages from the gateway

    def receive(self, message: FromGateway | AdminRequest) -> None:
        if isinstance(message, AdminRequest):
            self._service.admin_api.answer_remote(message, self._answer)
        else:
            super().receive(message)

    def _answer(self, answered: AdminResponse) -> None:
        if self.child is not None:
            self.child.send(answered)

    def check_health(self) -> None:
        super().check_health()
        if self._holds_until and time.monotonic() >= self._holds_until:
            self.publish(self._topology)

    def status(self) -> GatewayStatus:
        return replace(super().status(), node=self.node.host)


class RemoteGateways:
    """All remote gateways of an instance; none without a cluster, or if not configured.

    `gateways` are those on the supervisor's node; those of other nodes are added to and removed
    from this list. `run` runs the life of a gateway.
    """

    def __init__(
        self,
        gateways: list[Gateway],
        service: Service | None,
        host: SupervisorContext,
        run: Callable[[ManagedProcess[Any]], None],
    ) -> None:
        self._gateways = gateways
        self._service = service
        self._host = host
        self._run = run
        self._by_host: dict[str, RemoteGateway] = {}
        self._halted = False

    def start_all(self) -> None:
        """Run one gateway on each node from now on."""
        if self._service is not None and self._service.launcher.gateways_everywhere:
            self._service.launcher.cluster.on_nodes = self._converge
            self._converge()

    def stop_starting(self) -> None:
        """Start no more gateways."""
        self._halted = True

    def _ended(self, life: RemoteGateway) -> None:
        """Remove a gateway that has ended; its node may be back already."""
        if self._halted:
            return
        del self._by_host[life.node.host]
        self._gateways.remove(life)
        self._gateways[0].succeed(life)
        self._converge()

    def _converge(self) -> None:
        """Compare the gateways with the nodes, and start or end the difference."""
        if self._halted or self._service is None:
            return
        cluster = self._service.launcher.cluster
        in_use = {host: one.node.node for host, one in self._by_host.items()}
        sites = sites_of(cluster.nodes, cluster.own, in_use)
        for host, node in sorted(sites.items()):
            if host in self._by_host:
                self._by_host[host].node = node
                continue
            log.info("node_gateway_starting", node=host)
            made = RemoteGateway(node, self._service, self._host, self._gateways[0])
            made.on_over = self._ended
            self._by_host[host] = made
            self._gateways.append(made)
            self._run(made)
        for host in self._by_host.keys() - sites.keys():
            if not self._by_host[host].ending:
                log.warning("node_lost", node=host)
                self._by_host[host].end_child(Stop(), _LOST_S)


def remote_gateways(
    gateways: list[Gateway],
    server: ServerConfig,
    listeners: Sequence[socket.socket],
    launcher: RayLauncher | None,
    host: SupervisorContext,
    admin_api: AdminApi,
    run: Callable[[ManagedProcess[Any]], None],
) -> RemoteGateways:
    """Return the remote gateways of an instance whose own gateways have these sockets."""
    ports = tuple(sock.getsockname()[1] for sock in listeners)
    service = None if launcher is None else Service(server, ports, launcher, admin_api)
    return RemoteGateways(gateways, service, host, run)


def _is_whole(topology: Topology) -> bool:
    """Return whether all workers have been found again or lost: none is starting or loading."""
    workers = [replica for model in topology.models for replica in model.replicas]
    on_their_way = ("starting", "loading")
    return bool(topology.models) and all(one.state not in on_their_way for one in workers)


def listens_at(host: str, node: str) -> str:
    """Return the address to listen on at a node, for the configured `server.host`.

    A wildcard address stays; a specific address is our machine's, so the node's own replaces it.
    """
    return host if host in _EVERY_ADDRESS else node
