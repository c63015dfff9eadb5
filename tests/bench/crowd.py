"""Crowds of clients in processes of their own, which begin together and ask so many times each.

Each process opens its connections, says so, and waits to be told to begin: their clock is one
(CLOCK_MONOTONIC), so that a rate is all their tokens between the first request and the last byte.
Tokens are those that the server counts in `usage`. A stream's time to the first token ends with
its first event; `own_cores` near 1 says that a process was itself the limit.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from tests.bench.cpu import cpu_s
from tests.bench.load import Count, Unexpected
from tests.bench.table import percentile

#: Where the usage is: at the end of a stream, before `[DONE]`, and of a whole answer.
_END_BYTES = 2048
#: Gaps that a process reports, evenly from the sorted ones.
_SAMPLE = 2000
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
LIMIT_S = 240.0


class Order(msgspec.Struct, frozen=True):
    """What to ask: for each connection its bodies, one after the other."""

    port: int
    path: str
    bodies: list[list[str]]
    stream: bool
    mark: str = ""  # what the first event must have to count as one


class Told(msgspec.Struct, frozen=True):
    """What one process saw."""

    began: float
    ended: float
    tokens: int
    events: int
    firsts_s: list[float]
    gaps_s: list[float]
    own_cores: float


@dataclass(frozen=True, slots=True)
class Round:
    """What all of them saw."""

    tokens_per_s: float
    events: int
    tokens: int
    firsts_s: tuple[float, ...]
    own_cores: float  # of the busiest
    gaps_s: tuple[float, ...] = ()  # a sorted sample of the times between two writes of a stream

    def first_s(self, fraction: float) -> float:
        return percentile(self.firsts_s, fraction)

    def gap_s(self, fraction: float) -> float:
        return percentile(self.gaps_s, fraction)


def ask(order: Order, processes: int) -> Round:
    """Divide the connections among processes, and have them begin at once. Raises Unexpected."""
    with ExitStack() as stack:
        started = []
        for at in range(min(processes, len(order.bodies))):
            process = stack.enter_context(_process())
            stack.callback(process.kill)
            started.append(process)
            _say(process, msgspec.json.encode(_part(order, at, processes)).decode())
        for process in started:
            _hear(process)  # it is connected
        for process in started:
            _say(process, "begin")
        told = [msgspec.json.decode(_hear(process), type=Told) for process in started]
    wall_s = max(one.ended for one in told) - min(one.began for one in told)
    tokens = sum(one.tokens for one in told)
    return Round(
        tokens / wall_s,
        sum(one.events for one in told),
        tokens,
        tuple(itertools.chain.from_iterable(one.firsts_s for one in told)),
        max(one.own_cores for one in told),
        tuple(itertools.chain.from_iterable(one.gaps_s for one in told)),
    )


def _part(order: Order, at: int, of: int) -> Order:
    return msgspec.structs.replace(order, bodies=order.bodies[at::of])


def _process() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.bench.crowd"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    if line := process.stdout.readline():
        return line
    raise Unexpected(process.stderr.read())


# ---------------------------------------------------------------- in the process


class Crowd(Count):
    """What has come over all connections of this process."""

    def __init__(self, connections: int, mark: str = "") -> None:
        super().__init__(mark)
        self.tokens = 0
        self.firsts_s: list[float] = []
        self.gaps_s: list[float] = []
        self.asking = connections

    def done(self) -> None:
        self.asking -= 1
        if not self.asking and not self.failed.done():
            self.failed.set_result(None)


class Asker(asyncio.Protocol):
    """One connection, which asks its bodies one after the other."""

    def __init__(self, requests: Sequence[bytes], crowd: Crowd, stream: bool) -> None:
        self._requests = iter(requests)
        self._crowd = crowd
        self._stream = stream
        self._transport: asyncio.Transport | None = None
        self._asked = 0.0
        self._answered = False  # anything has come of this answer
        self._last_s = 0.0  # when the last event has; 0: none has
        self._end = b""
        self._left = 0  # bytes that are to come of a whole answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is not a subclass

    def begin(self) -> None:
        assert self._transport is not None
        request = next(self._requests, None)
        if request is None:
            self._crowd.done()
            return
        self._answered, self._last_s = False, 0.0
        self._end = b""
        self._asked = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if not self._answered:
            self._answered = True
            if not data.startswith(b"HTTP/1.1 200"):
                self._crowd.fail(data[:600].decode(errors="replace"))
                return
            self._left = 0 if self._stream else _size(data)
        if self._stream:
            self._count_events(data)
        self._end = (self._end + data)[-_END_BYTES:]
        self._left -= len(data)
        if self._end.endswith(b"0\r\n\r\n") if self._stream else self._left <= 0:
            self._finish()

    def _count_events(self, data: bytes) -> None:
        events = data.count(b"\n\n")
        if events:
            now = time.monotonic()
            if not self._last_s and self._crowd.mark not in data:
                pass  # a role, which says nothing yet
            elif self._last_s:
                self._crowd.gaps_s.append(now - self._last_s)
                self._last_s = now
            else:
                self._crowd.firsts_s.append(now - self._asked)
                self._last_s = now
        self._crowd.events += events

    def _finish(self) -> None:
        found = _TOKENS.findall(self._end)
        if not found:
            self._crowd.fail(f"no usage: {self._end[-600:]!r}")
            return
        self._crowd.tokens += int(found[-1])
        self.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.fail(f"the connection was lost: {exc}")  # unless it is over

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def _size(data: bytes) -> int:
    """Length of a whole answer whose head has come."""
    end = data.index(b"\r\n\r\n")
    at = data.lower().index(b"content-length: ") + 16
    return end + 4 + int(data[at : data.index(b"\r", at)])


async def _drive(order: Order) -> Told:
    loop = asyncio.get_running_loop()
    crowd = Crowd(len(order.bodies), order.mark)
    askers: list[Asker] = []
    for bodies in order.bodies:
        requests = [_request(order, body) for body in bodies]

        def made(requests: Sequence[bytes] = requests) -> Asker:
            return Asker(requests, crowd, order.stream)

        _, asker = await loop.create_connection(made, "127.0.0.1", order.port)
        askers.append(asker)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    began, before = time.monotonic(), cpu_s(os.getpid())
    for asker in askers:
        asker.begin()
    await asyncio.wait_for(asyncio.shield(crowd.failed), LIMIT_S)
    ended, after = time.monotonic(), cpu_s(os.getpid())
    for asker in askers:
        asker.end()
    own_cores = (after - before) / (ended - began)
    gaps_s = sorted(crowd.gaps_s)[:: max(1, len(crowd.gaps_s) // _SAMPLE)]
    return Told(began, ended, crowd.tokens, crowd.events, crowd.firsts_s, gaps_s, own_cores)


def _request(order: Order, body: str) -> bytes:
    encoded = body.encode()
    head = (
        f"POST {order.path} HTTP/1.1\r\nhost: 127.0.0.1:{order.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


def main() -> int:
    import uvloop

    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        told = runner.run(_drive(order))
    print(msgspec.json.encode(told).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
