"""A gateway's connection to this worker, with its requests in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import replace

from servekit.errors import EngineFailed, RequestError, WireError, WorkerLost
from servekit.protocol.messages import (
    PROTOCOL,
    Body,
    Borrow,
    Cancel,
    Delta,
    DeltaBatch,
    Failed,
    GatewayToWorker,
    Generate,
    Hello,
    TokenBatch,
    WindowUpdate,
)
from servekit.protocol.transport.connection import Connection

if TYPE_CHECKING:
    from servekit.worker.runner import Runner

log: Any = structlog.get_logger("servekit.worker")

#: Errors of output that is too long for a message, or that no message can hold.
_UNSENDABLE = (WireError, OverflowError, TypeError, ValueError)


class GatewayConnection:
    """A connection to this worker, from a gateway or from the worker's own warm-up probe."""

    def __init__(self, runner: Runner, connection: Connection[Any] | None = None) -> None:
        self.runner = runner
        self.jobs: dict[int, int] = {}  # request id → job id
        if connection is None:
            connection = Connection(GatewayToWorker, self._on_message, self._on_close)
        else:
            connection.switch_protocol(GatewayToWorker, self._on_message, self._on_close)
        self.connection: Connection[GatewayToWorker] = connection
        connection.on_turn = self.flush
        self._deltas: list[Delta] = []
        self._told: set[int] = set()  # ids of the requests in `_deltas`
        self._plain = TokenBatch([], [], [])
        self._incomplete: dict[int, tuple[Generate, bytearray]] = {}  # their bodies are arriving
        self.greeted = False

    def add_delta(self, delta: Delta) -> None:
        """Send a delta in one message with the others of this event-loop tick."""
        if not self._deltas:
            self.connection.gather()
        self._told.add(delta.id)
        self._deltas.append(delta)

    def add_one(self, id: int, text: str, token_id: int) -> None:
        """Send one token of a request that has nothing else to report; cheaper than `add_delta`."""
        if self._told and id in self._told:  # keep the order of the request's output
            self.flush()
        plain = self._plain
        if not plain.ids:
            self.connection.gather()
        plain.ids.append(id)
        plain.texts.append(text)
        plain.token_ids.append(token_id)

    def fail(self, request_id: int, error: RequestError) -> None:
        self.jobs.pop(request_id, None)
        told = (error.code, error.message, error.param, error.retry_after_s)
        self.flush()  # first send what this tick produced before the failure
        self.connection.send(Failed(request_id, *told))

    def flush(self) -> None:
        """Send the queued tokens and deltas now."""
        if self._plain.ids:
            plain, self._plain = self._plain, TokenBatch([], [], [])
            try:
                self.connection.send(plain)
            except _UNSENDABLE:
                for id, text, token in zip(plain.ids, plain.texts, plain.token_ids, strict=True):
                    self._send_alone(id, TokenBatch([id], [text], [token]))
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._told.clear()
            try:
                self.connection.send(DeltaBatch(deltas))
            except _UNSENDABLE:
                for delta in deltas:
                    self._send_alone(delta.id, DeltaBatch([delta]))

    def _send_alone(self, id: int, message: TokenBatch | DeltaBatch) -> None:
        """Send the output of one request, as that of all together cannot be sent.

        If it cannot be sent alone either, its request fails.
        """
        try:
            self.connection.send(message)
        except WireError as error:
            self._give_up(id, RequestError.code, f"the answer is too long: {error.message}")
        except _UNSENDABLE as error:
            log.exception("request_output_failed", request=id)
            self._give_up(id, EngineFailed.code, f"the engine's output cannot be sent: {error}")

    def _give_up(self, id: int, code: str, message: str) -> None:
        self.connection.send(Failed(id, code, message))
        self.runner.cancel(self, id)

    def close(self) -> None:
        """Send everything queued, then close the connection.

        Requests whose bodies have not arrived are given back: they have not begun here.
        """
        self.flush()
        for request_id in self._incomplete:
            self.fail(request_id, WorkerLost("the worker ended before the whole body was there"))
        self._incomplete.clear()
        self.connection.close()

    def _on_message(self, message: GatewayToWorker) -> None:
        if isinstance(message, Generate) and self.greeted:
            if len(message.body) < message.body_bytes:
                self._incomplete[message.id] = message, bytearray(message.body)
            else:
                self.runner.accept(self, message)
        elif isinstance(message, Body):
            self._add_to_body(message)
        elif isinstance(message, WindowUpdate):
            self.runner.extend_window(self, message.id, message.size_bytes)
        elif isinstance(message, Cancel):
            self._incomplete.pop(message.id, None)
            self.runner.cancel(self, message.id, tells=message.tells)
        elif isinstance(message, Borrow):
            self.runner.lending.borrow(self, message.share)
        elif isinstance(message, Hello) and message.protocol == PROTOCOL:
            self.accept_hello(message)
        else:
            raise WireError(f"expected Hello for protocol {PROTOCOL}, got {message!r:.200}")

    def _add_to_body(self, message: Body) -> None:
        """Add a piece to a body, and accept the request once the body is complete."""
        if message.id not in self._incomplete:
            return  # cancelled
        request, body = self._incomplete[message.id]
        body += message.data
        if len(body) >= request.body_bytes:
            del self._incomplete[message.id]
            self.runner.accept(self, replace(request, body=bytes(body)))

    def accept_hello(self, hello: Hello) -> None:
        """Answer the peer's Hello and accept its requests, or hang up if the engine has died."""
        if self.runner.dead:
            self.connection.abort()
            return
        self.greeted = True
        own = Hello(PROTOCOL, "worker", self.runner.engine.spec.name, self.runner.info)
        self.connection.send(own)
        self.runner.ward.send_state(self)
        if hello.role == "gateway":
            self.runner.on_greeting(hello.name)

    def _on_close(self, error: Exception | None) -> None:
        if isinstance(error, WireError):
            log.warning("gateway_connection_broken", error=str(error))
        self.runner.cancel_peer(self)
