"""Channel of a worker whose supervisor is on another machine: one TCP port for all peers.

Gateways send requests, a supervisor takes over the control channel
(`protocol.transport.remote_server`), and the worker connects to itself to verify that it is
reachable.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from servekit.errors import StartError, WireError
from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterLoaded,
    AdapterSpec,
    AdapterUnloaded,
    SetAdapters,
)
from servekit.protocol.control.startup_messages import GatewayConnected, PhaseReport
from servekit.protocol.messages import (
    BootFailed,
    FromWorker,
    Hello,
    Load,
    Loading,
    Ready,
    ToWorker,
    WorkerSpec,
)
from servekit.protocol.residency import Asleep, Awake
from servekit.protocol.transport.address import host_and_port, is_tcp, tcp_address
from servekit.protocol.transport.connection import LOST_S, Connection, Factory, dial_address
from servekit.protocol.transport.credentials import read_credentials
from servekit.protocol.transport.remote_server import GRACE_S, ListenOptions, TcpServer
from servekit.protocol.transport.resumable_channel import Attached
from servekit.worker.gateway_connection import GatewayConnection

if TYPE_CHECKING:
    from servekit.worker.runner import Runner


def make_channel(args: argparse.Namespace) -> TcpChannel:
    """Create the channel from the command line. Raises StartError, OSError."""
    if not is_tcp(args.listen):
        raise StartError(f"{args.listen!r} is not of the form tcp://HOST:PORT")
    grace_s = GRACE_S if args.grace_s is None else args.grace_s
    lost_s = LOST_S if args.lost_s is None else args.lost_s
    credentials = read_credentials(args.credentials_fd)
    return TcpChannel(
        ListenOptions(args.listen, args.advertise, credentials, args.report_fd, grace_s, lost_s)
    )


class TcpChannel(TcpServer):
    """The TCP channel of a remote worker. Used only on the worker's event loop."""

    role = "worker"
    incoming = ToWorker
    is_remote = True

    def __init__(self, post: ListenOptions) -> None:
        super().__init__(post)
        self._runner: Runner | None = None
        self._summary = Summary()
        self._spec: WorkerSpec | None = None

    async def serve(self, spec: WorkerSpec, runner: Runner) -> None:
        self._runner = runner

    def stop_serving(self) -> None:
        """Do nothing: the supervisor uses the port too, and a dead worker rejects gateways."""

    async def dial(self, factory: Factory) -> Connection[object]:
        host, _ = host_and_port(self._post.listen)
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return await dial_address(tcp_address(here, self.port), factory, self.identity)

    def send(self, message: Any) -> None:
        self._summary.record(message)
        super().send(message)

    # ---- the supervisor

    def replay_messages(self) -> list[FromWorker]:
        return self._summary.replay_messages()

    def attached(self, resumed: bool, had: int) -> Attached:
        state, now_s = self._summary.state(loading=self._spec is not None), time.monotonic()
        told = (state, self._spec, self._summary.added)
        return Attached(resumed, had, os.getpid(), now_s, *told)

    def on_control_message(self, message: ToWorker) -> None:
        match message:
            case SetAdapters(added):
                self._summary.added = added
                return
            case Load() if self._spec is not None:
                return  # an adopting supervisor reads the worker's spec from Attached
            case Load(spec):
                self._spec = spec
        super().on_control_message(message)

    # ---- gateways and the probe

    def admit(self, connection: Connection[Any], hello: Hello) -> None:
        """Accept a gateway or the worker's probe. Raises WireError before the model is loaded."""
        if self._runner is None:
            raise WireError("the model is not loaded yet")
        peer = GatewayConnection(self._runner, connection)
        self._runner.peers.add(peer)
        peer.accept_hello(hello)


class Summary:
    """Summary of the messages sent so far, for a supervisor that connects later.

    Its size is bounded by the worker's state, not by its uptime.
    """

    def __init__(self) -> None:
        self._phases: dict[str, PhaseReport] = {}
        self._gateways: dict[str, GatewayConnected] = {}
        self._loading: Loading | None = None
        self._ready: Ready | None = None
        self._failed: BootFailed | None = None
        self._adapters: dict[str, AdapterInfo] = {}
        self._asleep: Asleep | None = None
        self.added: tuple[AdapterSpec, ...] = ()  # by operators, as last set by the supervisor

    def record(self, message: Any) -> None:
        """Record a message of the worker to the supervisor."""
        match message:
            case PhaseReport(phase):
                self._phases[phase.name] = message
            case GatewayConnected(gateway):
                self._gateways[gateway] = message
            case Loading():
                self._loading = message
            case Ready(info):
                self._ready = message
                self._adapters = {adapter.name: adapter for adapter in info.adapters}
            case BootFailed():
                self._failed = message
            case AdapterLoaded(_, adapter):
                self._adapters[adapter.name] = adapter
            case AdapterUnloaded(_, name):
                self._adapters.pop(name, None)
            case Asleep():
                self._asleep = message
            case Awake():
                self._asleep = None

    def state(self, *, loading: bool) -> Literal["empty", "loading", "ready", "failed"]:
        """Return the worker's stage of start-up."""
        if self._failed is not None:
            return "failed"
        if self._ready is not None:
            return "ready"
        return "loading" if loading else "empty"

    def replay_messages(self) -> list[Any]:
        """Return the messages that reproduce the worker's state."""
        told: list[Any] = list(self._phases.values())
        if self._failed is not None:
            return [*told, self._failed]
        if self._ready is None:
            return [*told, *([] if self._loading is None else [self._loading])]
        info = replace(self._ready.info, adapters=tuple(self._adapters.values()))
        told += [Ready(info, self._ready.timings_s), *self._gateways.values()]
        return [*told, *([] if self._asleep is None else [self._asleep])]
