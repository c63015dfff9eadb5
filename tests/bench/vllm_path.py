"""The worker's half of a token's way: from a step of vLLM's core to the frame for the gateway.

    python -m tests.bench.vllm_path [--streams 512] [--steps 400] [--profile]

Neither vLLM nor a GPU is needed: the core's steps are made up, of messages with the same fields.
All runs in one thread, stage after stage, and what is told is the CPU time of each stage:
microseconds for a token. At 512 streams and 70 steps/s there are 36,000 of them in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from servekit.engines.api.base import StepOutput
from servekit.engines.text.token_bytes import Pieces
from servekit.engines.text.tokenizer import TokenizerCodec
from servekit.engines.vllm.engine import VllmEngine
from servekit.engines.vllm.generation_defaults import Stated
from servekit.protocol.messages import PROTOCOL, Generate, Hello, ModelInfo, SamplingParams
from servekit.protocol.transport.connection import adopt_socket
from servekit.worker.runner import Runner
from servekit.worker.transport import InheritedChannel
from servekit.worker.worker import Worker
from tests.unit.engines.harness import byte_level_tokenizer, make_spec


class Output(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's `EngineCoreOutput`."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: Any = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0


class Outputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """vLLM's `EngineCoreOutputs`, as far as it is used."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: Any = None
    timestamp: float = 0.0


class Idle(VllmEngine):
    """The engine without its core: what it is asked for goes nowhere."""

    def __init__(self) -> None:
        super().__init__(make_spec("/model", engine="vllm", device="cuda"))
        tokenizer = byte_level_tokenizer()
        self.codec = TokenizerCodec(tokenizer)
        self._pieces = Pieces(tokenizer)
        self._stated = Stated(frozenset({2}), 2, {})
        self.vocab_size = len(tokenizer)
        self._embeds = False
        self.names: list[str] = []

    def submit(self, job: Any) -> None:
        name = f"{job.id}#{len(self.names)}"
        self.names.append(name)
        self._held.add_job(job.id, [name])

    def cancel(self, job_id: int) -> None:
        self._held.cancel(job_id)


INFO = ModelInfo(
    parameters=0,
    max_context=2**20,
    slots=512,
    chat=True,
    architecture="Llama",
    dtype="bfloat16",
    device="cuda",
    serves=("generate",),
)


class Bench:
    """A worker's parts, wired as `worker.Worker` does it, but for the threads between them."""

    def __init__(self, streams: int) -> None:
        self.engine = Idle()
        self.worker = Worker("path", InheritedChannel(socket.socketpair()[0]), time.monotonic())
        self.runner = Runner(self.engine, INFO, lambda: None)
        self.worker._runner = self.runner
        self.runner.on_step = self.worker._on_step
        self.worker._engine = self.engine
        self.streams = streams
        self.spent_s: dict[str, float] = {}
        self._here: list[Sequence[StepOutput]] = []
        self.engine.start(self._here.append)
        self.decoder = msgspec.msgpack.Decoder(Outputs)

    async def open(self, peer_end: socket.socket) -> None:
        """A gateway that asks for all streams."""
        connection = self.runner.connect()
        await adopt_socket(peer_end, lambda: connection)
        [self.peer] = self.runner.peers
        self.peer._on_message(Hello(PROTOCOL, "gateway", "bench"))
        for number in range(self.streams):
            params = SamplingParams(max_tokens=2**19, temperature=1.0)
            self.runner.accept(self.peer, Generate(number, params, prompt=[5] * 64))

    def step(self, frame: bytes) -> None:
        began = time.thread_time()
        found = self.decoder.decode(frame)
        decoded = time.thread_time()
        self.engine._take_step(found)
        taken = time.thread_time()
        self.runner.emit(self._here.pop())
        delivered = time.thread_time()
        self.peer.flush()
        self.peer.connection._flush()
        sent = time.thread_time()
        stages = {"decode": decoded - began, "take": taken - decoded}
        stages |= {"deliver": delivered - taken, "send": sent - delivered}
        for name, took_s in stages.items():
            self.spent_s[name] = self.spent_s.get(name, 0.0) + took_s


def frames(names: Sequence[str], count: int) -> list[bytes]:
    encode = msgspec.msgpack.Encoder().encode
    return [
        encode(
            Outputs(
                outputs=[Output(name, [35 + (7 * n + at) % 80]) for n, name in enumerate(names)]
            )
        )
        for at in range(count)
    ]


@contextmanager
def _reader() -> Iterator[socket.socket]:
    """The other end of a connection, read and thrown away by another process."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
    yield ours
    process.kill()
    process.wait()


async def measure(streams: int, steps: int, profile: Path | None) -> dict[str, float]:
    """Microseconds for each token, by stage."""
    with _reader() as end:
        bench = Bench(streams)
        await bench.open(end)
        some = frames(bench.engine.names, 16)
        for frame in some:
            bench.step(frame)
        rounds: list[dict[str, float]] = []
        for _ in range(5):
            bench.spent_s = {}
            for at in range(steps // 5):
                bench.step(some[at % len(some)])
                await asyncio.sleep(0)
            rounds.append(bench.spent_s)
        if profile is not None:
            with cProfile.Profile() as watched:
                for at in range(steps // 5):
                    bench.step(some[at % len(some)])
            watched.dump_stats(profile)
        bench.peer.connection.abort()
        tokens = streams * (steps // 5)
        return {
            name: statistics.median(spent[name] for spent in rounds) / tokens * 1e6
            for name in rounds[0]
        }


def main(arguments: Sequence[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m tests.bench.vllm_path", description=__doc__)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--profile", action="store_true", help="and where the time goes")
    options = parser.parse_args(arguments)
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile" if options.profile else None
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(measure(options.streams, options.steps, profile))
        if profile is not None:
            import pstats

            pstats.Stats(str(profile)).sort_stats("tottime").print_stats(18)
    said = ", ".join(f"{name} {took:.2f}" for name, took in found.items())
    print(f"{sum(found.values()):.2f} µs a token: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
