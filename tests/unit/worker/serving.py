"""A worker's inside behind a real socket, and one who speaks to it as a gateway does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

from servekit.engines import create_engine
from servekit.engines.api.base import Engine
from servekit.protocol.messages import (
    PROTOCOL,
    Cancel,
    Delta,
    DeltaBatch,
    Failed,
    Generate,
    Hello,
    ModelInfo,
    SamplingParams,
    TokenBatch,
    WorkerSpec,
    WorkerToGateway,
)
from servekit.protocol.transport.connection import Connection, dial_address, listen_at
from servekit.worker.runner import Runner
from tests.unit.gateway.conftest import DEADLINE_S


def spec(folder: Path, engine: str = "echo", path: str = "-", **options: Any) -> WorkerSpec:
    socket = str(folder / "s")
    return WorkerSpec(
        "m/0", "m", engine, path, None, "cpu", "auto", None, False, {}, options, socket
    )


def deltas_of(message: DeltaBatch | TokenBatch) -> list[Delta]:
    """What it tells of each request; of one more token without the counts."""
    if isinstance(message, DeltaBatch):
        return message.deltas
    rows = zip(message.ids, message.texts, message.token_ids, strict=True)
    return [Delta(id, text, [token_id]) for id, text, token_id in rows]


class Client:
    """Sends requests and keeps what comes, by request id."""

    def __init__(self, runner: Runner, engine: Engine, info: ModelInfo) -> None:
        self.runner, self.engine, self.info = runner, engine, info
        self.deltas: dict[int, list[Delta]] = {}
        self.failures: dict[int, Failed] = {}
        self._ids = count(1)
        self._changed = asyncio.Event()
        self.connection: Connection[WorkerToGateway]

    async def connect(self, socket: str) -> None:
        self.connection = await dial_address(
            socket, lambda: Connection(WorkerToGateway, self._on_message, lambda error: None)
        )
        self.connection.send(Hello(PROTOCOL, "gateway", "g"))

    def _on_message(self, message: WorkerToGateway) -> None:
        if isinstance(message, DeltaBatch | TokenBatch):
            for delta in deltas_of(message):
                self.deltas.setdefault(delta.id, []).append(delta)
        elif isinstance(message, Failed):
            self.failures[message.id] = message
        self._changed.set()

    def send(self, params: SamplingParams | None = None, **fields: Any) -> int:
        request = Generate(next(self._ids), params or SamplingParams(), **fields)
        self.connection.send(request)
        return request.id

    def cancel(self, request_id: int) -> None:
        self.connection.send(Cancel(request_id))

    async def answer(self, request_id: int) -> list[Delta]:
        """All deltas, once it has ended well."""
        await self._end(request_id)
        assert request_id not in self.failures, self.failures[request_id]
        return self.deltas[request_id]

    async def failure(self, request_id: int) -> Failed:
        await self._end(request_id)
        return self.failures[request_id]

    async def _end(self, request_id: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not self._ended(request_id):
                self._changed.clear()
                await self._changed.wait()

    def _ended(self, request_id: int) -> bool:
        last = self.deltas.get(request_id, [])[-1:]
        return request_id in self.failures or bool(last and last[0].finish)


@contextlib.asynccontextmanager
async def serving(spec: WorkerSpec) -> AsyncIterator[Client]:
    """Load an engine, serve it, and connect."""
    engine = create_engine(spec)
    info = await asyncio.to_thread(engine.load, lambda progress: None)
    runner = Runner(engine, info, on_idle=lambda: None)
    engine.start(runner.emit)
    server = await listen_at(spec.socket, runner.connect)
    client = Client(runner, engine, info)
    await client.connect(spec.socket)
    try:
        yield client
    finally:
        client.connection.close()
        server.close()
        engine.close()
