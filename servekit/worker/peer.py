"""One connection to this worker, and what its gateway has in flight here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from servekit.errors import RequestError, WireError
from servekit.wire.connection import Connection
from servekit.wire.messages import (
    PROTOCOL,
    Cancel,
    Delta,
    Failed,
    GatewayToWorker,
    Generate,
    Hello,
    Tokens,
)

if TYPE_CHECKING:
    from servekit.worker.runner import Runner

log: Any = structlog.get_logger("servekit.worker")


class Peer:
    """One connection to this worker: a gateway, or the worker's own warm-up probe."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.jobs: dict[int, int] = {}  # request id → job id
        self.connection: Connection[GatewayToWorker] = Connection(
            GatewayToWorker, self._on_message, self._on_close
        )
        self._deltas: list[Delta] = []
        self.greeted = False

    def add(self, delta: Delta) -> None:
        """Send a delta with the others of this turn of the loop, in one message."""
        if not self._deltas:
            self.runner.loop.call_soon(self.flush)
        self._deltas.append(delta)

    def fail(self, request_id: int, error: RequestError) -> None:
        self.jobs.pop(request_id, None)
        told = (error.code, error.message, error.param, error.retry_after_s)
        self.connection.send(Failed(request_id, *told))

    def flush(self) -> None:
        """Send the deltas now."""
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            try:
                self.connection.send(Tokens(deltas))
            except WireError:
                self._flush_apart(deltas)

    def _flush_apart(self, deltas: list[Delta]) -> None:
        """Together they are too long for a message; one that is by itself is refused."""
        for delta in deltas:
            try:
                self.connection.send(Tokens([delta]))
            except WireError as error:
                said = f"the answer is too long: {error.message}"
                self.connection.send(Failed(delta.id, RequestError.code, said))

    def close(self) -> None:
        """Send what is left and close."""
        self.flush()
        self.connection.close()

    def _on_message(self, message: GatewayToWorker) -> None:
        if isinstance(message, Generate) and self.greeted:
            self.runner.accept(self, message)
        elif isinstance(message, Cancel):
            self.runner.cancel(self, message.id)
        elif isinstance(message, Hello) and message.protocol == PROTOCOL:
            self.greeted = True
            self.connection.send(
                Hello(PROTOCOL, "worker", self.runner.engine.spec.name, self.runner.info)
            )
            self.runner.ward.greet(self)
        else:
            raise WireError(f"expected Hello for protocol {PROTOCOL}, got {message!r:.200}")

    def _on_close(self, error: Exception | None) -> None:
        if isinstance(error, WireError):
            log.warning("connection closed", error=str(error))
        self.runner.forget(self)
