"""A worker that drains is idle when its answers are out, not when they are made."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from servekit.engines.echo import EchoEngine
from servekit.wire.connection import Connection, dial, listen
from servekit.wire.messages import (
    PROTOCOL,
    Generate,
    Hello,
    OneEach,
    SamplingParams,
    Tokens,
    WorkerSpec,
    WorkerToGateway,
)
from servekit.worker.runner import Runner
from tests.unit.gateway.conftest import DEADLINE_S, until
from tests.unit.worker.serving import deltas_of

#: Much more than a socket's buffer takes while nobody reads.
TOKENS = 200_000


async def test_the_last_answer_is_out_before_it_is_idle(tmp_path: Path) -> None:
    options = {"max_context": 10**6}
    spec = WorkerSpec(
        "m/0", "m", "echo", "-", None, "cpu", "auto", None, False, {}, options, str(tmp_path / "s")
    )
    engine = EchoEngine(spec)
    info = engine.load(lambda progress: None)
    idle = asyncio.Event()
    runner = Runner(engine, info, on_idle=idle.set)
    engine.start(runner.emit)
    server = await listen(spec.socket, runner.connect)
    got: list[Any] = []
    connection: Connection[WorkerToGateway] = await dial(
        spec.socket, lambda: Connection(WorkerToGateway, got.append, lambda error: None)
    )
    connection.send(Hello(PROTOCOL, "gateway", "g"))
    connection.send(Generate(1, SamplingParams(max_tokens=TOKENS), prompt="hello"))
    await until(lambda: runner.busy)
    runner.draining = True
    assert connection._transport is not None
    connection._transport.pause_reading()
    await until(lambda: not runner.busy)
    assert not idle.is_set(), "it is made, and nobody has read it"
    connection._transport.resume_reading()
    async with asyncio.timeout(DEADLINE_S):
        await idle.wait()
        await connection.closed
    deltas = [
        delta
        for message in got
        if isinstance(message, Tokens | OneEach)
        for delta in deltas_of(message)
    ]
    assert sum(len(delta.token_ids) for delta in deltas) == TOKENS
    assert deltas[-1].finish == "length"
    server.close()
    engine.close()


async def test_an_engine_that_is_faster_than_its_worker_leaves_it_turns(tmp_path: Path) -> None:
    """Each step that is passed on brings another one from the engine's thread."""
    spec = WorkerSpec(
        "m/0", "m", "echo", "-", None, "cpu", "auto", None, False, {}, {}, str(tmp_path / "s")
    )
    engine = EchoEngine(spec)
    runner = Runner(engine, engine.load(lambda progress: None), on_idle=lambda: None)
    steps = 0

    def step_again(tokens: int, ends: int) -> None:
        nonlocal steps
        steps += 1
        if steps < 100:
            emitting = threading.Thread(target=runner.emit, args=([],))
            emitting.start()
            emitting.join()

    runner.on_step = step_again
    emitting = threading.Thread(target=runner.emit, args=([],))
    emitting.start()
    emitting.join()
    seen: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(steps))
    await until(lambda: steps == 100)
    assert seen[0] < 100, "nothing else had its turn before the last step"
