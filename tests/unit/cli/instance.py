"""A control socket that answers as a test says, for commands that ask a running instance."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from typer.testing import CliRunner, Result

from servekit.cli.main import app
from servekit.protocol.messages import (
    FromSupervisor,
    GatewayStatus,
    GetStatus,
    ModelStatus,
    ReplicaStatus,
    Status,
    ToSupervisor,
    WorkerState,
)
from servekit.protocol.transport.connection import Connection, listen_at

#: An answer, one that comes later, or none.
Answer = FromSupervisor | Coroutine[Any, Any, FromSupervisor] | None


def make_replica(name: str = "m/0", state: WorkerState = "ready") -> ReplicaStatus:
    return ReplicaStatus(name, state, "", 11, "cpu")


def make_model(name: str = "m", *replicas: ReplicaStatus) -> ModelStatus:
    """A model of the engine echo, by default with one ready worker."""
    return ModelStatus(name, "echo", "none", 0, replicas or (make_replica(f"{name}/0"),))


def make_status(*models: ModelStatus) -> Status:
    gateway = GatewayStatus("gateway/0", 12, "ready")
    status = Status("0", 10, "http://127.0.0.1:1", "f.yaml", 0.0, 0, models, (gateway,), False)
    return status if models else replace(status, models=(make_model(),))


@contextlib.contextmanager
def listening(
    folder: Path,
    answer: Callable[[ToSupervisor], Answer],
    status: Callable[[], Status] | Status | None = None,
) -> Iterator[list[object]]:
    """Listen in the run directory `folder`; yield what was asked, in order, without GetStatus."""
    heard: list[object] = []
    ready, done = threading.Event(), asyncio.Event()

    async def reply(connection: Connection[ToSupervisor], message: ToSupervisor) -> None:
        told: Answer
        if isinstance(message, GetStatus):
            told = status() if callable(status) else status or make_status()
        else:
            heard.append(message)
            told = answer(message)
        if isinstance(told, Coroutine):
            told = await told
        if told is not None:
            connection.send(told)

    async def serve() -> None:
        def connect() -> Connection[ToSupervisor]:
            def on_message(message: ToSupervisor) -> None:
                replies.append(asyncio.ensure_future(reply(connection, message)))

            connection = Connection[ToSupervisor](ToSupervisor, on_message, lambda error: None)
            return connection

        replies: list[asyncio.Future[None]] = []

        server = await listen_at(folder / "control.sock", connect)
        ready.set()
        await done.wait()
        server.close()
        await asyncio.gather(*replies)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield heard
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(10)
        loop.close()
        (folder / "control.sock").unlink(missing_ok=True)


def invoke(*words: object, run_dir: Path | None = None, typed: str = "") -> Result:
    """Run a command of `servekit` in this process; `typed` is its input."""
    where = () if run_dir is None else ("--run-dir", run_dir)
    return CliRunner().invoke(app, [str(word) for word in (*words, *where)], input=typed)
