"""The gateway's own CPU time for a request and for a token, without sockets and other processes.

    python -m tests.bench.gateway_cost [--seconds S] [--only TEXT]

Requests enter as bytes at the HTTP protocol, and a worker's messages are delivered by hand, so that
the quickest of many small batches repeats within a few per cent on a busy machine. What the kernel
and the event loop cost is left out: see `stream_cost` and `python -m tests.bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import uvicorn
import uvloop
from uvicorn.server import ServerState

from servekit.gateway.app import Application
from servekit.gateway.http.limits import LIMITS
from servekit.gateway.http.protocol import Http
from servekit.gateway.routing import worker_connection
from servekit.gateway.routing.router import Router
from servekit.gateway.server import keep_out_of_collections
from servekit.protocol.messages import (
    PROTOCOL,
    AccessRules,
    Delta,
    DeltaBatch,
    Dialect,
    Generate,
    Hello,
    ModelInfo,
    ModelStatus,
    ReplicaStatus,
    TokenBatch,
    Topology,
)

BATCH = 100
MODEL = "SmolLM2-135M-Instruct"
ASKED = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {"messages": ASKED, "max_tokens": 5}
#: By name: the path and the body of a request that is answered whole.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 5}),
    "chat": ("/v1/chat/completions", CHAT),
    "Responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 5}),
    "Anthropic": ("/v1/messages", CHAT),
    "Ollama": ("/api/chat", {"messages": ASKED, "stream": False}),
}
#: By name: whether the model thinks, the path and the body of a request that is streamed.
STREAMED: dict[str, tuple[bool, str, dict[str, Any]]] = {
    "chat": (False, "/v1/chat/completions", CHAT),
    "completion": (False, "/v1/completions", {"prompt": "hello", "max_tokens": 5}),
    "chat, thinking model": (True, "/v1/chat/completions", CHAT),
    "chat, tools": (True, "/v1/chat/completions", CHAT | {"tools": [TOOL]}),
    "Responses": (False, "/v1/responses", {"input": "hello"}),
    "Anthropic": (False, "/v1/messages", CHAT),
    "Ollama": (False, "/api/chat", {"messages": ASKED}),
}


class Wire(asyncio.Transport):
    """A transport that keeps nothing."""

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Worker:
    """The gateway's connection to a worker, which keeps the last request."""

    crowded = False
    on_writable: Any = None
    asked: Generate

    def send(self, message: Any) -> None:
        if isinstance(message, Generate):
            self.asked = message

    def close(self) -> None:
        pass


class Gateway:
    """A gateway with one worker, by hand."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.router = Router("gateway/0")
        self._app = Application(self.router, 2**20, ui=False)
        self._config = uvicorn.Config(self._app, http=Http, ws="none", lifespan="off")
        self._config.load()
        self._state = ServerState()

    async def start(self, *, thinks: bool) -> None:
        dialect = Dialect(think_begin="<think>", think_end="</think>", tools="hermes")
        info = ModelInfo(
            100_000, 64, True, "echo", "none", "cpu",
            serves=("generate", "tools"), dialect=dialect if thinks else Dialect(),
        )  # fmt: skip
        replica = ReplicaStatus("0", "ready", "nowhere", 1, "cpu")
        status = ModelStatus(MODEL, "echo", "none", 0, (replica,), info)

        async def dial(*_: object, **__: object) -> Worker:
            return self.worker

        with mock.patch.object(worker_connection, "dial_address", dial):
            self.router.apply(Topology((status,), access=AccessRules(hosts=("localhost",))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        self.replica = self.router.routes[MODEL].replicas["nowhere"]
        self.replica._on_message(Hello(PROTOCOL, "worker", "0", info))

    def connect(self) -> Http:
        made: Any = partial(
            Http, hot=self._app.exchanges, max_body_bytes=2**20, limits=LIMITS,
            answers=defaultdict(int), envelopes=self._app.envelopes,
        )  # fmt: skip
        connection: Http = made(self._config, self._state, {})
        connection.connection_made(Wire())
        return connection


def request_of(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps({"model": MODEL, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\nuser-agent: bench\r\naccept: */*\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def whole(path: str, body: dict[str, Any]) -> Callable[[], None]:
    """Return a function that plays a request with a whole answer."""
    gateway = Gateway()
    await gateway.start(thinks=False)
    connection, data = gateway.connect(), request_of(path, body)

    def play() -> None:
        connection.data_received(data)
        id = gateway.worker.asked.id
        last = Delta(id, "hello", [1, 2, 3, 4, 5], "length", 5, 5)
        gateway.replica._on_message(DeltaBatch([last]))

    return play


async def streamed(thinks: bool, path: str, body: dict[str, Any]) -> Callable[[], None]:
    """Return a function that plays one more token of a stream."""
    gateway = Gateway()
    await gateway.start(thinks=thinks)
    connection = gateway.connect()
    connection.data_received(request_of(path, {"stream": True, **body}))
    call = gateway.replica.calls[gateway.worker.asked.id]
    first = Delta(call.wire_id, "hello", [1], prompt_tokens=5)
    gateway.replica._on_message(DeltaBatch([first]))
    await asyncio.sleep(0)
    step = TokenBatch([call.wire_id], [" hello"], [5])

    def play() -> None:
        gateway.replica._on_message(step)
        call.emitted.clear()

    return play


async def quickest_us(works: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Return the time of each in its quickest batch, by turns, with a turn of the loop for each."""
    best = dict.fromkeys(works, float("inf"))
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for name, work in works.items():
            began_s = time.perf_counter()
            for _ in range(BATCH):
                work()
                await asyncio.sleep(0)
            best[name] = min(best[name], 1e6 * (time.perf_counter() - began_s) / BATCH)
    return best


async def measure(seconds: float, only: str) -> None:
    works = {f"{name}, whole": await whole(*asked) for name, asked in WHOLE.items()}
    works |= {f"{name}, a token": await streamed(*asked) for name, asked in STREAMED.items()}
    works = {name: work for name, work in works.items() if only in name}
    keep_out_of_collections()
    for name, us in (await quickest_us(works, seconds)).items():
        print(f"{name:30} {us:6.2f} µs")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway_cost", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", default="", help="measure what has this in its name")
    given = parser.parse_args(arguments)
    uvloop.run(measure(given.seconds, given.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
