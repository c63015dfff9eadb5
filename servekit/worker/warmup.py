"""The worker's own probe request, along the path of ordinary requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from servekit.errors import LoadError
from servekit.protocol.messages import (
    PROTOCOL,
    DeltaBatch,
    Failed,
    Generate,
    Hello,
    ModelInfo,
    SamplingParams,
    WorkerToGateway,
)
from servekit.protocol.transport.connection import Connection, Factory


async def warm_up(
    dial: Callable[[Factory], Awaitable[Connection[Any]]], info: ModelInfo, timeout_s: float = 600.0
) -> None:
    """Complete one request along the path of ordinary requests. Raises LoadError on failure."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_message(message: WorkerToGateway) -> None:
        if done.done():
            return
        if isinstance(message, Failed):
            text = f"the warm-up request failed: {message.message}"
            done.set_exception(LoadError(text, permanent=False))
        elif isinstance(message, DeltaBatch) and any(delta.finish for delta in message.deltas):
            done.set_result(None)

    def on_close(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(LoadError(f"warm-up broke off: {error}", permanent=False))

    connection = await dial(lambda: Connection(WorkerToGateway, on_message, on_close))
    connection.send(Hello(PROTOCOL, "probe", "warm-up"))
    connection.send(_probe_request(info))
    try:
        await asyncio.wait_for(done, timeout_s)
    except TimeoutError:
        raise LoadError(f"no warm-up token within {timeout_s:g} s", permanent=False) from None
    finally:
        connection.close()


def _probe_request(info: ModelInfo) -> Generate:
    """Return a request for two tokens, or for an embedding if the model does not generate."""
    if "generate" in info.serves:
        return Generate(1, SamplingParams(max_tokens=2, temperature=0.0), prompt="Hello")
    return Generate(1, SamplingParams(), task="embed", inputs=["Hello"])
