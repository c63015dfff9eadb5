"""A load generator in a process of its own: keep-alive connections that ask, count and ask again.

    python -m tests.bench.load < ORDER.json

It does as little per answer as it can, so that it is not what is measured: the requests are made
before, an answer is told to be whole by its length, and of a stream `\\n\\n` and marks are counted.
Its result is one line of JSON; `own_cores` says how much of a core it took: near 1, it was the
limit.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from tests.bench.cpu import cpu_s, machine_cpu_s, read_own_s, writes


class Order(msgspec.Struct, frozen=True):
    """What to ask, how often at once, for how long, and which processes to watch meanwhile."""

    port: int
    path: str
    body: str
    connections: int
    watch: tuple[int, ...]  # PIDs; the first is the server's
    stream: bool = False
    seconds: float = 2.0
    warm_s: float = 0.5
    bodies: tuple[str, ...] = ()  # asked by turns, in place of `body`
    headers: tuple[str, ...] = ()  # of the requests, by turns: each line whole, with its end
    mark: str = "~"  # what a token of a stream says once, and nothing else does
    own: str = ""  # a file where a watched process tells CPU time of its that does not count
    number: str = ""  # what the bodies say once and get the request's number for, as wide
    first: int = 0  # the first request's number


class Result(msgspec.Struct, frozen=True):
    """What came within the measured time. `cpu_s` is the watched processes', in their order."""

    wall_s: float
    answers: int
    events: int  # server-sent ones
    tokens: int  # marks in them
    received: int  # bytes
    writes: int  # by the first watched process
    own_cores: float
    other_cores: float  # taken by what is neither this process nor watched
    cpu_s: tuple[float, ...]
    own_s: float = 0.0  # as told in `Order.own`

    @property
    def answers_per_s(self) -> float:
        return self.answers / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


#: Connections that are opened at once.
TOGETHER = 256
#: What a token of the echo engine's streams says.
MARK = "~"


class Unexpected(Exception):
    """The server answered something else than 200, or closed the connection."""


def run(order: Order, within_s: float = 60.0) -> Result:
    """Run the load in a process of its own; raises Unexpected with what it said."""
    command, told = [sys.executable, "-m", "tests.bench.load"], msgspec.json.encode(order).decode()
    done = subprocess.run(
        command, input=told, capture_output=True, text=True, timeout=within_s, check=False
    )
    if done.returncode:
        raise Unexpected(done.stderr)
    return msgspec.json.decode(done.stdout, type=Result)


def together(results: Sequence[Result]) -> Result:
    """Return what several processes saw at the same time; the servers' CPU time is the first's."""
    (one, *others) = results
    return (
        msgspec.structs.replace(
            one,
            **{
                name: sum(getattr(each, name) for each in results)
                for name in ("answers", "events", "tokens", "received")
            },
            wall_s=max(each.wall_s for each in results),
            own_cores=max(each.own_cores for each in results),
        )
        if others
        else one
    )


class Count:
    """What has come over all connections."""

    def __init__(self, mark: str = MARK) -> None:
        self.mark = mark.encode()
        self.answers = self.events = self.tokens = self.received = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, why: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(Unexpected(why))


class Client(asyncio.Protocol):
    """One connection; it asks again as soon as an answer is whole."""

    def __init__(self, requests: Iterator[bytes], count: Count) -> None:
        self._requests = requests
        self._count = count
        self._transport: asyncio.Transport | None = None
        self._closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is not a subclass

    def ask(self) -> None:
        assert self._transport is not None
        self._transport.write(next(self._requests))

    def _check(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._count.fail(data[:600].decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closing:
            self._count.fail(f"the connection was lost: {exc}")

    def end(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.abort()


class WholeClient(Client):
    """Answers with a content-length."""

    _received = b""
    _expected = 0

    def data_received(self, data: bytes) -> None:
        self._count.received += len(data)
        if self._received:
            data = self._received + data
        expected = self._expected or self._size(data)
        if len(data) < expected or not expected:
            self._received, self._expected = data, expected
            return
        self._received, self._expected = b"", 0
        self._count.answers += 1
        self.ask()

    def _size(self, data: bytes) -> int:
        """Length of the whole answer; 0 while its head is not there."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return 0
        self._check(data)
        at = data.index(b"content-length: ") + 16
        return end + 4 + int(data[at : data.index(b"\r", at)])


class StreamClient(Client):
    """Server-sent events in chunks, up to the empty chunk."""

    _tail = b""

    def data_received(self, data: bytes) -> None:
        # An event cut between its two \n is seen by the neighbours alone: what follows the second
        # one is HTTP's \r or the next event's first letter, so nothing is counted twice.
        self._count.events += data.count(b"\n\n") + (self._tail[-1:] == b"\n" == data[:1])
        self._count.tokens += data.count(self._count.mark)
        self._count.received += len(data)
        tail = (self._tail + data if len(data) < 5 else data)[-5:]
        if tail != b"0\r\n\r\n":
            self._tail = tail
            self._check(data)
            return
        self._tail = b""
        self._count.answers += 1
        self.ask()


async def drive(order: Order) -> Result:
    """Open all connections, let them warm up, and count for `seconds`."""
    loop = asyncio.get_running_loop()
    count = Count(order.mark)
    requests = _numbered(itertools.cycle(_requests(order)), order.number.encode(), order.first)
    kind = StreamClient if order.stream else WholeClient
    clients: list[Client] = []
    for begin in range(0, order.connections, TOGETHER):
        some = range(begin, min(order.connections, begin + TOGETHER))
        opening = [
            loop.create_connection(lambda: kind(requests, count), "127.0.0.1", order.port)
            for _ in some
        ]
        clients += [client for _, client in await asyncio.gather(*opening)]
    for client in clients:  # none before all are open: those that ask hold up the next
        client.ask()
    await _pass(count, order.warm_s)
    before, began = _snapshot(count, order), time.perf_counter()
    await _pass(count, order.seconds)
    wall_s, after = time.perf_counter() - began, _snapshot(count, order)
    for client in clients:
        client.end()
    return _result(wall_s, [b - a for a, b in zip(before, after, strict=True)])


async def _pass(count: Count, seconds: float) -> None:
    """Let time pass; raises Unexpected as soon as something goes wrong."""
    await asyncio.wait([count.failed], timeout=seconds)
    if count.failed.done():
        count.failed.result()


def _snapshot(count: Count, order: Order) -> list[float]:
    watched = [cpu_s(pid) for pid in order.watch]
    mine = cpu_s(os.getpid())
    counted = (count.answers, count.events, count.tokens, count.received)
    told_s = read_own_s(order.own) if order.own else 0.0
    return [*counted, writes(order.watch[0]), machine_cpu_s(), mine, told_s, *watched]


def _result(wall_s: float, differences: list[float]) -> Result:
    answers, events, tokens, received, written, machine_s, own_s, told_s, *watched = differences
    others_s = max(0.0, machine_s - own_s - sum(watched))
    return Result(
        wall_s,
        int(answers),
        int(events),
        int(tokens),
        int(received),
        int(written),
        own_s / wall_s,
        others_s / wall_s,
        tuple(watched),
        told_s,
    )


def _requests(order: Order) -> list[bytes]:
    """Return the requests as they are written: each body with each of the headers in turn."""
    bodies, headers = order.bodies or (order.body,), order.headers or ("",)
    made = []
    for number in range(max(len(bodies), len(headers))):
        body = bodies[number % len(bodies)].encode()
        more = headers[number % len(headers)]
        head = (
            f"POST {order.path} HTTP/1.1\r\nhost: 127.0.0.1:{order.port}\r\n"
            f"content-type: application/json\r\n{more}"
            f"content-length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


def _numbered(requests: Iterator[bytes], mark: bytes, first: int) -> Iterator[bytes]:
    """Make each request unlike all others, if they are marked."""
    if not mark:
        return requests
    numbers = itertools.count(first)
    return (one.replace(mark, b"%0*d" % (len(mark), next(numbers)), 1) for one in requests)


def main() -> int:
    import uvloop

    order = msgspec.json.decode(sys.stdin.read(), type=Order)
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(drive(order))
    print(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
