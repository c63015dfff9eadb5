"""What the Python of a gateway's hot path costs, beside a bare uvicorn application's.

    python -m tests.bench.path [--seconds S] [--only TEXT]

A gateway's own objects, from a connection's `data_received` to its `write`, with sockets that only
keep what is written: no kernel, no other process. Slices of time are taken by turns, each in an
event loop of its own, for streams that are open have work in every turn of theirs; the quickest
batch of each counts, for what else runs on the machine only adds. So small steps can be seen on a
busy one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from servekit.gateway.app import Application
from servekit.gateway.http.limits import LIMITS
from servekit.gateway.http.protocol import Http
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.worker_connection import WorkerConnection
from servekit.gateway.server import keep_out_of_collections
from servekit.protocol.access import AccessRules
from servekit.protocol.messages import (
    PROTOCOL,
    Delta,
    DeltaBatch,
    Dialect,
    Hello,
    ModelInfo,
    ModelStatus,
    ReplicaStatus,
    TokenBatch,
    Topology,
)
from servekit.system.python.lean_start import collect_less
from tests.bench.bare import Bare

CLIENTS = 64
STREAMS = 128
SLICE_S = 0.2
BODY = b'{"model": "echo", "prompt": "hello", "max_tokens": 5}'
STREAM = b'{"model": "echo", "prompt": "hello", "max_tokens": 8000, "stream": true}'
INFO = ModelInfo(8192, 100_000, True, "echo", "none", "cpu")
#: A model that thinks and calls tools.
RICH = msgspec.structs.replace(
    INFO,
    serves=("generate", "tools"),
    dialect=Dialect(think_begin="<think>", think_end="</think>", tools="hermes"),
)
ASKED = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MESSAGES: dict[str, Any] = {"messages": ASKED, "max_tokens": 8000}
CHAT = b"/v1/chat/completions"
#: Streams by name: the model, the path and the body.
STREAMS_OF: dict[str, tuple[ModelInfo, bytes, dict[str, Any]]] = {
    "a chat's token": (INFO, CHAT, MESSAGES),
    "a thinking chat's token": (RICH, CHAT, MESSAGES),
    "a chat's token, with tools": (RICH, CHAT, MESSAGES | {"tools": [TOOL]}),
    "a token of Responses": (INFO, b"/v1/responses", {"input": "hello"}),
    "a token of Anthropic's API": (INFO, b"/v1/messages", MESSAGES),
    "a token of Ollama's API": (INFO, b"/api/chat", {"messages": ASKED}),
}


def request(path: bytes, body: bytes) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nhost: 127.0.0.1:8000\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (path, len(body), body)
    )


class Kept(asyncio.Transport):
    """A socket that takes all and keeps the last of it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = b""
        self.writes = 0

    def write(self, data: Any) -> None:
        self.last = data
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass


def connections(app: Any, count: int, **more: Any) -> list[tuple[Any, Kept]]:
    """`count` of a server's, as uvicorn makes them."""
    kind = Http if more else "httptools"
    config = uvicorn.Config(app, http=kind, ws="none", lifespan="off", log_config=None)
    config.access_log = False
    config.load()
    server = uvicorn.Server(config)
    state = server.server_state
    state.default_headers = [(b"date", b"Sun, 22 Nov 2026 16:00:00 GMT")]
    made = []
    for _ in range(count):
        protocol: Any = config.http_protocol_class
        one = protocol(config=config, server_state=state, app_state={}, **more)
        transport = Kept()
        one.connection_made(transport)
        made.append((one, transport))
    return made


class Worker:
    """The worker's end of a gateway's connection."""

    def __init__(self, router: Router, info: ModelInfo) -> None:
        self.info = info
        replica = ReplicaStatus("echo/0", "ready", "/nowhere", 1, "cpu")
        model = ModelStatus("echo", "echo", "-", 0, (replica,), info, max_queue=100_000)
        hosts = AccessRules(hosts=("127.0.0.1",))
        router.apply_topology(Topology((model,), False, 1, access=hosts))
        (self.replica,) = router.routes["echo"].replicas.values()
        self.socket = Kept()

    def connect(self) -> None:
        replica: Any = self.replica
        replica._dialling.cancel()
        self.connection = replica._connection = WorkerConnection._factory(replica)
        self.connection.connection_made(self.socket)
        self.tell(Hello(PROTOCOL, "worker", "echo/0", self.info))

    def tell(self, message: Any) -> None:
        self.connection.data_received(frame(message))


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


class Ours:
    """One gateway with its clients and its worker."""

    def __init__(self, clients: int, info: ModelInfo = INFO) -> None:
        self.router = Router("gateway/0")
        app = Application(self.router, 2**20, ui=False)
        self.worker = Worker(self.router, info)
        self.worker.connect()
        measures = self.router.measures.answers
        more: dict[str, Any] = {"hot": app.exchanges, "max_body_bytes": 2**20, "limits": LIMITS}
        more |= {"envelopes": app.envelopes, "connected": lambda: None}
        self.clients = connections(app, clients, answers=measures, **more)
        self.asks = request(b"/v1/completions", BODY)

    async def batch(self) -> float:
        """Ask and answer once for each client; seconds."""
        first = self.worker.replica.last_id + 1
        began = time.perf_counter()
        for client, _ in self.clients:
            client.data_received(self.asks)
        await asyncio.sleep(0)
        took = time.perf_counter() - began
        ids = range(first, first + len(self.clients))
        deltas = [Delta(id, "hello", [1, 2, 3, 4, 5], "length", 5, 5) for id in ids]
        answers = [frame(DeltaBatch(deltas[at : at + 8])) for at in range(0, len(deltas), 8)]
        began = time.perf_counter()
        for answer in answers:
            self.worker.connection.data_received(answer)
            await asyncio.sleep(0)
        took += time.perf_counter() - began
        assert self.clients[-1][1].last.endswith(b"}}"), self.clients[-1][1].last
        return took / len(self.clients)


class Theirs:
    """The bare application with its clients."""

    def __init__(self, clients: int) -> None:
        self.clients = connections(Bare(b"x" * 260), clients)
        self.asks = request(b"/whole", BODY)

    async def batch(self) -> float:
        began = time.perf_counter()
        for client, _ in self.clients:
            client.data_received(self.asks)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        took = time.perf_counter() - began
        assert self.clients[-1][1].last.endswith(b"x")
        return took / len(self.clients)


class OurStreams:
    """Streams of a gateway, all of which get one more token, one write each."""

    def __init__(
        self,
        streams: int,
        info: ModelInfo = INFO,
        path: bytes = b"/v1/completions",
        body: bytes = STREAM,
    ) -> None:
        self.ours = Ours(streams, info)
        ask = request(path, body)
        for client, _ in self.ours.clients:
            client.data_received(ask)
        ids = list(range(1, streams + 1))
        self.step = frame(TokenBatch(ids, ["~"] * streams, [126] * streams))
        self.asked = False

    async def batch(self) -> float:
        if not self.asked:
            self.asked = True
            await asyncio.sleep(0)
        clients = self.ours.clients
        before = clients[-1][1].writes
        began = time.perf_counter()
        self.ours.worker.connection.data_received(self.step)
        await asyncio.sleep(0)
        took = time.perf_counter() - began
        assert clients[-1][1].writes - before in (1, 2)  # the first with the stream's head
        return took / len(clients)


class TheirStreams(Theirs):
    """The bare application's, which makes up a chunk of each in turn."""

    asked = False

    async def batch(self) -> float:
        if not self.asked:
            self.asked = True
            ask = request(b"/turns", STREAM.replace(b"8000", b"8000000"))
            for client, _ in self.clients:
                client.data_received(ask)
            for _ in range(3):
                await asyncio.sleep(0)
        before = self.clients[-1][1].writes
        began = time.perf_counter()
        await asyncio.sleep(0)
        took = time.perf_counter() - began
        assert self.clients[-1][1].writes == before + 1
        return took / len(self.clients)


class Contestant:
    """One of them in an event loop of its own, which stands still while another has its turn."""

    def __init__(self, kind: Callable[[int], Any], count: int) -> None:
        import uvloop

        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.best_us = float("inf")
        self._one = self.runner.run(self._made(kind, count))

    async def _made(self, kind: Callable[[int], Any], count: int) -> Any:
        return kind(count)

    def turn(self) -> None:
        self.runner.run(self._turn())

    async def _turn(self) -> None:
        until = time.monotonic() + SLICE_S
        while time.monotonic() < until:
            self.best_us = min(self.best_us, 1e6 * await self._one.batch())


def measure(seconds: float, only: str) -> None:
    collect_less()
    keep_out_of_collections()
    logging.disable()  # streams that are cancelled at the end
    pairs: dict[str, tuple[Callable[[int], Any], Callable[[int], Any], int]] = {
        "a request": (Ours, Theirs, CLIENTS),
        "a token": (OurStreams, TheirStreams, STREAMS),
    }
    for name, (info, path, asked) in STREAMS_OF.items():
        body = msgspec.json.encode({"model": "echo", "stream": True, **asked})
        pairs[name] = partial(OurStreams, info=info, path=path, body=body), TheirStreams, STREAMS
    for what, (ours, theirs, count) in pairs.items():
        if only not in what:
            continue
        both = Contestant(ours, count), Contestant(theirs, count)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for one in both:
                one.turn()
        mine, bare = (one.best_us for one in both)
        ratio = f"bare / ours = {bare / mine:.2f}"
        print(f"{what}: ours {mine:.2f} µs, bare {bare:.2f} µs; {ratio}", flush=True)
        for one in both:
            one.runner.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {Path(__file__).stem}", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each comparison")
    parser.add_argument("--only", default="", help="measure what has this in its name")
    given = parser.parse_args(arguments)
    measure(given.seconds, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
