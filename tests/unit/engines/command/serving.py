"""A command engine over a server that misbehaves when told to."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from servekit.engines.command.engine import CommandEngine
from servekit.protocol.messages import Generate, SamplingParams, WorkerSpec
from tests.unit.engines.contract.subjects import spec
from tests.unit.engines.contract.test_text import Running

SERVER = [sys.executable, str(Path(__file__).parents[3] / "odd_server.py"), "--port", "{port}"]


def make_spec(*args: str, **options: Any) -> WorkerSpec:
    known = {"command": [*SERVER, *args], "base": "/v1", "health": "/health", "slots": 4}
    return spec("command", "counter", options=known | options)


@contextlib.asynccontextmanager
async def started(*args: str, **options: Any) -> AsyncIterator[tuple[CommandEngine, Running]]:
    engine = CommandEngine(make_spec(*args, **options))
    try:
        info = await asyncio.to_thread(engine.load, lambda progress: None)
        running = Running(engine, info)
        engine.start(running.emit)
        yield engine, running
    finally:
        await asyncio.to_thread(engine.close)


def plain(prompt: str, max_tokens: int = 6, **fields: Any) -> Generate:
    params = SamplingParams(max_tokens=max_tokens)
    return Generate(1, params, prompt=prompt, **fields)
