"""An engine core without a model for vLLM's Rust front end; it speaks as vllm/v1/engine/core.py.

    python -m tests.bench.rust_core MODEL INPUT OUTPUT

INPUT and OUTPUT are the ZMQ addresses that the front end listens at: requests come from the first
(ROUTER; this side is the DEALER that says first that it is ready), answers go to the second (PULL),
one message for each step. Requests and answers are msgpack arrays: EngineCoreRequest and
EngineCoreOutputs of vllm/v1/engine/__init__.py, the fields that are not needed left out.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.paced import CONTEXT, STEP_S, Pace, read_answer

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
LENGTH = 1  # FinishReason
#: As vLLM's own: the engine's index in two bytes, little-endian.
IDENTITY = (0).to_bytes(2, "little")
BLOCK = 16
READY = {
    "max_model_len": CONTEXT,
    "num_gpu_blocks": 2**20,
    "block_size": BLOCK,
    "dp_stats_address": None,
    "dtype": "bfloat16",
    "vllm_version": "0.26.0",
    "world_size": 1,
    "data_parallel_size": 1,
    "kv_cache_size_tokens": BLOCK * 2**20,
    "kv_cache_max_concurrency": 128.0,
}


class Sampling(msgspec.Struct):
    """Of SamplingParams, what sets the pace."""

    max_tokens: int | None = 16


class Request(msgspec.Struct, array_like=True):
    """The beginning of EngineCoreRequest."""

    request_id: str
    prompt_token_ids: msgspec.Raw
    mm_features: msgspec.Raw
    sampling_params: Sampling


class Utility(msgspec.Struct, array_like=True):
    """A call of a method of the core: client, number, name and arguments."""

    client: int
    call: int
    method: str
    arguments: msgspec.Raw


class Core:
    """The loop between both sockets."""

    def __init__(self, model: Path, inputs: str, outputs: str) -> None:
        import zmq

        self._again = zmq.Again
        self._now = zmq.NOBLOCK
        context = zmq.Context()
        self._input = context.socket(zmq.DEALER)
        self._input.setsockopt(zmq.IDENTITY, IDENTITY)
        for socket in (self._input, output := context.socket(zmq.PUSH)):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
        self._output = output
        self._input.connect(inputs)
        self._output.connect(outputs)
        self._pace = Pace(read_answer(model))
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Request).decode
        self._input.send(self._encode(READY))

    def run(self) -> None:
        """Answer until the process is ended."""
        due_s = 0.0
        while True:
            runs = self._pace.runs
            if not runs:
                self._input.poll()
            elif (left_s := due_s - time.monotonic()) > 0:
                # ZMQ counts in whole milliseconds: the rest is slept.
                if left_s < 0.001:
                    time.sleep(left_s)
                else:
                    self._input.poll(int(left_s * 1e3))
            idle = not runs
            self._take_all()
            if idle and runs:
                due_s = time.monotonic() + STEP_S
            if runs and time.monotonic() >= due_s:
                self._step()
                due_s = max(due_s + STEP_S, time.monotonic())

    def _take_all(self) -> None:
        at_once: list[Any] = []
        while True:
            try:
                kind, *frames = self._input.recv_multipart(self._now)
            except self._again:
                break
            if kind == ADD:
                request = self._decode(frames[0])
                tokens = request.sampling_params.max_tokens or 0
                if tokens == 1:
                    at_once.append(_output(request.request_id, self._pace.first, True))
                else:
                    self._pace.add(request.request_id, tokens)
            elif kind == ABORT:
                for key in msgspec.msgpack.decode(frames[0]):
                    self._pace.drop(key)
            elif kind == UTILITY:
                call = msgspec.msgpack.decode(frames[0], type=Utility)
                reply = [call.call, None, [None, None]]
                self._output.send(self._encode([0, [], None, time.monotonic(), reply]))
        self._send(at_once)

    def _step(self) -> None:
        self._send([_output(*one) for one in self._pace.step()])

    def _send(self, outputs: list[Any]) -> None:
        if outputs:
            self._output.send(self._encode([0, outputs, None, time.monotonic()]))


def _output(key: str, token: int, last: bool) -> list[Any]:
    """An EngineCoreOutput up to its finish_reason."""
    return [key, [token], None, None, None, LENGTH] if last else [key, [token]]


if __name__ == "__main__":
    Core(Path(sys.argv[1]), *sys.argv[2:4]).run()
