"""Channel of a worker whose supervisor is on another machine: one TCP port for all peers.

Gateways send requests, a supervisor takes over the control channel
(`protocol.transport.remote_server`), and the worker connects to itself to verify that it is
reachable.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from servekit.errors import StartError, WireError
from servekit.protocol.adapters import SetAdapters
from servekit.protocol.messages import FromWorker, Hello, Load, ToWorker, WorkerSpec
from servekit.protocol.transport.address import host_and_port, is_tcp, tcp_address
from servekit.protocol.transport.connection import LOST_S, Connection, Factory, dial_address
from servekit.protocol.transport.credentials import read_credentials
from servekit.protocol.transport.remote_server import GRACE_S, ListenOptions, TcpServer
from servekit.protocol.transport.resumable_channel import Attached
from servekit.worker.gateway_connection import GatewayConnection
from servekit.worker.state_summary import Summary

if TYPE_CHECKING:
    from servekit.worker.runner import Runner


def posted(args: argparse.Namespace) -> TcpChannel:
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
        self._summary.note(message)
        super().send(message)

    # ---- the supervisor

    def told(self) -> list[FromWorker]:
        return self._summary.told()

    def attached(self, resumed: bool, had: int) -> Attached:
        state, now_s = self._summary.state(loading=self._spec is not None), time.monotonic()
        told = (state, self._spec, self._summary.added)
        return Attached(resumed, had, os.getpid(), now_s, *told)

    def hear(self, message: ToWorker) -> None:
        match message:
            case SetAdapters(added):
                self._summary.added = added
                return
            case Load() if self._spec is not None:
                return  # an adopting supervisor reads the worker's spec from Attached
            case Load(spec):
                self._spec = spec
        super().hear(message)

    # ---- gateways and the probe

    def admit(self, connection: Connection[Any], hello: Hello) -> None:
        """Accept a gateway or the worker's probe. Raises WireError before the model is loaded."""
        if self._runner is None:
            raise WireError("the model is not loaded yet")
        peer = GatewayConnection(self._runner, connection)
        self._runner.peers.add(peer)
        peer.meet(hello)
