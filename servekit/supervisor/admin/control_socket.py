"""Control socket for operators, both ends, as used by `servekit ps` and `servekit down`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from servekit.errors import ConfigError, ServekitError, StartError
from servekit.protocol.adapters import AddAdapter, GetAdapters, RemoveAdapter
from servekit.protocol.control.metrics_messages import GetMetrics
from servekit.protocol.control.remote_gateway import AdminRequest, AdminResponse
from servekit.protocol.messages import (
    Accepted,
    CreateLink,
    FromSupervisor,
    GetStatus,
    GetWhy,
    RedeemLink,
    Refused,
    Reload,
    Restart,
    SetProfile,
    Shutdown,
    ToSupervisor,
)
from servekit.protocol.residency import SetResidency
from servekit.protocol.transport.connection import Connection, listen_at
from servekit.protocol.transport.rpc import ask_supervisor
from servekit.supervisor.process.run_dir import no_instance_error, read_record
from servekit.system import procfs

if TYPE_CHECKING:
    from servekit.supervisor.admin.adapter_service import AdapterService
    from servekit.supervisor.admin.metrics import MetricsAggregator
    from servekit.supervisor.model_swap.manager import SwapManager
    from servekit.supervisor.supervisor import Supervisor

log: Any = structlog.get_logger("servekit.supervisor")

A = TypeVar("A", bound=FromSupervisor)
_LOOK_EVERY_S = 0.05


class AdminApi:
    """Server of the control socket."""

    def __init__(
        self,
        supervisor: Supervisor,
        adapters: AdapterService,
        swap_manager: SwapManager,
        metrics: MetricsAggregator,
    ) -> None:
        self._supervisor = supervisor
        self._adapters = adapters
        self._swap_manager = swap_manager
        self._metrics = metrics
        self._answering: set[asyncio.Task[None]] = set()
        self._connections: set[Connection[ToSupervisor]] = set()
        self._server: asyncio.Server | None = None
        self._listening: asyncio.Task[None] | None = None

    async def listen(self, path: Path) -> None:
        """Listen on `path`. Raises StartError if that fails, as on file systems without sockets."""
        try:
            self._server = await listen_at(path, self._connect)
        except OSError as error:
            raise StartError(f"cannot listen on {path}: {error.strerror}") from error

    def listen_again(self, path: Path) -> None:
        """Create the socket again if it was removed; call this often."""
        if path.exists() or self._server is None:
            return
        if self._listening is None or self._listening.done():
            self._listening = asyncio.get_running_loop().create_task(self._replace(path))

    async def _replace(self, path: Path) -> None:
        self.close()  # first, since some event loops remove the path on closing
        try:
            await self.listen(path)
        except StartError as error:
            log.warning("control_socket_unavailable", reason=error.message)
        else:
            log.warning("control_socket_restored", path=str(path))

    def close(self) -> None:
        """Accept no more connections; clients that wait for the shutdown see the process exit."""
        if self._server is not None:
            self._server.close()

    def _connect(self) -> Connection[ToSupervisor]:
        connection: Connection[ToSupervisor] = Connection(
            ToSupervisor,
            lambda message: self._on_message(connection, message),
            lambda error: self._connections.discard(connection),
        )
        self._connections.add(connection)
        return connection

    def _on_message(self, connection: Connection[ToSupervisor], message: ToSupervisor) -> None:
        answer = self.handle(message)
        if isinstance(answer, Coroutine):
            self._create_task(_send(connection, answer))
        else:
            connection.send(answer)

    def handle(self, message: ToSupervisor) -> FromSupervisor | Coroutine[Any, Any, FromSupervisor]:
        """Return the answer to a message, or a coroutine that returns it."""
        match message:
            case GetStatus():
                return self._supervisor.status_now()
            case Shutdown(now):
                self._supervisor.shutdown(now)
                return Accepted()
            case GetWhy(name):
                return self._supervisor.why(name)
            case Reload():
                return self._supervisor.reload()
            case SetProfile(name):
                return self._supervisor.set_profile(name)
            case Restart(name, wait):
                return self._supervisor.restart(name, wait)
            case AddAdapter():
                return self._adapters.handle_add(message)
            case RemoveAdapter():
                return self._adapters.handle_remove(message)
            case GetAdapters():
                return self._adapters.list_adapters(message)
            case GetMetrics():
                return self._metrics.answer_metrics(message)
            case SetResidency():
                return self._swap_manager.reside(message)
            case CreateLink():
                return self._supervisor.create_link()
            case RedeemLink(token):
                return self._supervisor.redeem_link(token)

    def answer_remote(self, asked: AdminRequest, send: Callable[[AdminResponse], None]) -> None:
        """Answer an operator's HTTP request that a gateway on another machine passes on."""
        question = asked.question
        if isinstance(question, Shutdown | CreateLink):  # not offered over HTTP
            send(AdminResponse(asked.id, Refused("a gateway may not request that")))
            return
        self._create_task(
            _pass_on(self.handle(question), lambda told: send(AdminResponse(asked.id, told)))
        )

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


async def _pass_on(
    answer: FromSupervisor | Coroutine[Any, Any, FromSupervisor],
    send: Callable[[FromSupervisor], None],
) -> None:
    try:
        send(await answer if isinstance(answer, Coroutine) else answer)
    except Exception:
        log.exception("control_answer_failed")
        send(Refused("the supervisor cannot answer; its log says why"))


async def _send(
    connection: Connection[ToSupervisor], answer: Coroutine[Any, Any, FromSupervisor]
) -> None:
    try:
        connection.send(await answer)
    except Exception:  # do not keep the client waiting for an answer that will not come
        log.exception("control_answer_failed")
        connection.close()


async def query_supervisor(
    path: Path, message: ToSupervisor, timeout_s: float = 10.0
) -> FromSupervisor:
    """Send a message to the supervisor at the control socket `path` and return its answer.

    Raises StartError if no supervisor runs there, ConfigError if the request is invalid,
    ServekitError if it is refused for another reason or not answered.
    """
    try:
        reply = await ask_supervisor(path, message, timeout_s)
    except EOFError as error:
        raise ServekitError(str(error)) from None
    except TimeoutError:
        raise ServekitError(f"the supervisor did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise no_instance_error(path.parent) from error
    if isinstance(reply, Refused):
        raise (ConfigError if reply.invalid else ServekitError)(reply.message)
    return reply


async def request_answer(
    run_dir: Path, message: ToSupervisor, kind: type[A], timeout_s: float = 10.0
) -> A:
    """Return the answer of the instance in `run_dir`, which is of this kind.

    Raises as `query_supervisor` does, and ServekitError for another answer.
    """
    answer = await query_supervisor(run_dir / "control.sock", message, timeout_s)
    if not isinstance(answer, kind):
        raise ServekitError("the supervisor sent an answer of an unexpected type")
    return answer


def shut_down(run_dir: Path, *, now: bool) -> int:
    """Shut down the instance of `run_dir` and return its PID once the process has exited.

    Raises StartError if none runs there.
    """
    record = read_record(run_dir)
    process = procfs.read_process(record.pid) if record is not None else None
    if process is None:
        raise no_instance_error(run_dir)
    asyncio.run(query_supervisor(run_dir / "control.sock", Shutdown(now)))
    while procfs.is_alive(process.pid, process.started):
        time.sleep(_LOOK_EVERY_S)
    return process.pid
