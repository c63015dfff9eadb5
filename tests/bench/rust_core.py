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
from collections.abc import Sequence
from importlib import import_module
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
    """The loop between two ZMQ sockets, a DEALER and a PUSH."""

    def __init__(self, answer: Sequence[int], requests: Any, answers: Any) -> None:
        self._input, self._output = requests, answers
        self._pace = Pace(answer)
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
            self.take_all()
            if idle and runs:
                due_s = time.monotonic() + STEP_S
            if runs and time.monotonic() >= due_s:
                self.step()
                due_s = max(due_s + STEP_S, time.monotonic())

    def take_all(self) -> None:
        """Read all that has come, and answer what is answered at once."""
        at_once: list[Any] = []
        while self._input.poll(0):
            kind, *frames = self._input.recv_multipart()
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

    def step(self) -> None:
        """Give each request its next token."""
        self._send([_output(*one) for one in self._pace.step()])

    def _send(self, outputs: list[Any]) -> None:
        if outputs:
            self._output.send(self._encode([0, outputs, None, time.monotonic()]))


def _output(key: str, token: int, last: bool) -> list[Any]:
    """An EngineCoreOutput up to its finish_reason."""
    return [key, [token], None, None, None, LENGTH] if last else [key, [token]]


def main() -> None:
    zmq: Any = import_module("zmq")  # nothing else here needs it
    model, inputs, outputs = sys.argv[1:]
    context = zmq.Context()
    requests, answers = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    requests.setsockopt(zmq.IDENTITY, IDENTITY)
    for one, address in ((requests, inputs), (answers, outputs)):
        one.setsockopt(zmq.RCVHWM, 0)
        one.setsockopt(zmq.SNDHWM, 0)
        one.connect(address)
    Core(read_answer(Path(model)), requests, answers).run()


if __name__ == "__main__":
    main()
