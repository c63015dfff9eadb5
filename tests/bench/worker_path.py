"""What the Python of a worker's hot path costs: a streamed token, and a short request.

    python -m tests.bench.worker_path [--streams 128] [--profile]

A worker's own objects, from the echo engine's step to the bytes for its gateway, and from a
Generate's frame to the bytes of its answer. As in `tests.bench.path` there is no kernel and no
other process, and the quickest batch counts. The engine's step is called by hand: what its thread
costs beside the event loop's, by turns at one lock, is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from servekit.engines.api.base import StepOutput
from servekit.engines.echo.engine import EchoEngine
from servekit.protocol.messages import PROTOCOL, Generate, Hello, SamplingParams
from servekit.worker.runner import Runner
from servekit.worker.transport import InheritedChannel
from servekit.worker.worker import Worker
from tests.bench.path import Kept, frame
from tests.unit.worker.serving import spec

STREAMS = 128
CLIENTS = 64
ENDLESS = 10**9


class Stepped(EchoEngine):
    """Takes no step by itself."""

    def _run_thread(self) -> None:
        pass


class Serving:
    """A worker's parts, wired as `worker.Worker` does it, and one gateway's connection."""

    def __init__(self, step_s: float) -> None:
        nowhere = Path("/nowhere")
        options = spec(nowhere, step_s=step_s, slots=2**20, max_context=2 * ENDLESS)
        self.engine = Stepped(options)
        self.runner = Runner(self.engine, self.engine.load(lambda progress: None), lambda: None)
        self.worker = Worker("path", InheritedChannel(socket.socketpair()[0]), time.monotonic())
        self.worker._engine, self.worker._runner = self.engine, self.runner
        self.runner.on_step = self.worker._on_step
        self.engine.start(self.take)
        self.socket = Kept()
        self.connection = self.runner.connect()
        self.connection.connection_made(self.socket)
        self.connection.data_received(frame(Hello(PROTOCOL, "gateway", "bench")))

    def take(self, outputs: Sequence[StepOutput]) -> None:
        self.runner.emit(outputs)

    async def written(self, writes: int) -> None:
        """Turn the loop until there have been so many writes."""
        while self.socket.writes < writes:  # noqa: ASYNC110 - these turns are what is measured
            await asyncio.sleep(0)


class Requests(Serving):
    """Short requests, which one step answers."""

    def __init__(self, clients: int) -> None:
        super().__init__(step_s=0.0)
        ids = range(clients)
        params = SamplingParams(max_tokens=5)
        self.frames = [frame(Generate(id, params, prompt="hello")) for id in ids]

    async def batch(self) -> dict[str, float]:
        """Seconds of each."""
        before = self.socket.writes
        began = time.perf_counter()
        for asked in self.frames:
            self.connection.data_received(asked)
        await self.written(before + 1)
        took = time.perf_counter() - began
        assert not self.runner.busy
        return {"all": took / len(self.frames)}


class Streams(Serving):
    """Streams, of which a step brings each one more token."""

    def __init__(self, streams: int) -> None:
        super().__init__(step_s=0.001)
        self.streams = streams
        self.stepped_at = 0.0
        self.runner._thread = 0  # a step comes from the engine's own thread
        params = SamplingParams(max_tokens=ENDLESS)
        for id in range(streams):
            ask = Generate(id, params, prompt="hello, world")
            self.connection.data_received(frame(ask))

    def take(self, outputs: Sequence[StepOutput]) -> None:
        self.stepped_at = time.perf_counter()
        super().take(outputs)

    async def batch(self) -> dict[str, float]:
        """Seconds of each token: the engine's step, and the rest."""
        await asyncio.sleep(0)
        before = self.socket.writes
        began = time.perf_counter()
        self.engine._run_step()
        await self.written(before + 1)
        ended = time.perf_counter()
        parts = {"step": self.stepped_at - began, "delivery": ended - self.stepped_at}
        return {name: took / self.streams for name, took in parts.items()}


async def quickest_us(one: Requests | Streams, seconds: float) -> dict[str, float]:
    """Of each part by itself."""
    best = dict.fromkeys(await one.batch(), float("inf"))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name, took in (await one.batch()).items():
            best[name] = min(best[name], 1e6 * took)
    return best


async def measure(streams: int, seconds: float, profile: bool) -> None:
    contestants: dict[str, Requests | Streams] = {
        "a token": Streams(streams),
        "a short request": Requests(CLIENTS),
    }
    for what, one in contestants.items():
        best = await quickest_us(one, seconds)
        parts = ", ".join(f"{name} {us:.2f}" for name, us in best.items())
        print(f"{what}: {sum(best.values()):.2f} µs ({parts})", flush=True)
        if profile:
            with cProfile.Profile() as watched:
                await quickest_us(one, seconds)
            pstats.Stats(watched).sort_stats("tottime").print_stats(18)


def main(arguments: Sequence[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog=f"python -m {Path(__file__).stem}", description=__doc__)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--profile", action="store_true", help="and where the time goes")
    options = parser.parse_args(arguments)
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(options.streams, options.seconds, options.profile))
    return 0


if __name__ == "__main__":
    sys.exit(main())
