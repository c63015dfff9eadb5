"""How a request's cost grows with how many there are: waiting ones, streams, workers.

    python -m tests.bench.growth [--rounds 3] [--only waiting streams workers] [--quick]

    waiting   closed loop of so many clients, 64 of whose requests run and the rest wait in the
              queue: CPU time of the gateway for each answer, and memory for each that waits. More
              connections cost the kernel and the caches more, also where nothing waits: the growth
              is that of the multiple of what a bare app takes with as many clients
    streams   so many streams, paced so that they bring the same tokens per second all together:
              CPU time of the gateway for each token, and memory for each stream
    workers   so many echo workers: CPU time of the gateway for each answer, with 4 clients for each
              worker, as one adds workers for more load; and with 4 and 64 clients in all, however
              many there are to serve them. Requests of 64 clients share reads and writes where they
              go to one worker, and hardly where they go to 64, each of which has to be woken

Each row is told against the least of its kind. Rounds are taken by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from servekit.protocol.messages import Status
from tests.bench.cpu import memory_bytes
from tests.bench.figures import conditions
from tests.bench.load import MARK, Order, Result, run
from tests.bench.table import Figure, markdown, spread
from tests.integration.instance import Instance, echo
from tests.polling import poll

PATH = "/v1/completions"
SLOTS = 64
TOKENS_PER_S = 16_000
WAITING = (64, 500, 2_000, 10_000)
STREAMS = (1, 32, 128, 512, 2_000)
WORKERS = (1, 4, 16, 64)
#: How many clients there are for so many workers.
CLIENTS: dict[str, Callable[[int], int]] = {
    "4 clients each": lambda workers: 4 * workers,
    "64 clients": lambda workers: 64,
    "4 clients": lambda workers: 4,
}
#: What the bare app answers: about as much as the gateway does.
ANSWER = json.dumps({"choices": [{"index": 0, "text": "~~~~~", "finish_reason": "length"}] * 3})
PARTS = ("waiting", "streams", "workers")

K = TypeVar("K")


def body(model: str, **fields: object) -> str:
    return json.dumps({"model": model, "prompt": MARK * 64, "max_tokens": 5} | fields)


def waiting(folder: Path, args: argparse.Namespace) -> Iterator[Figure]:
    counts = WAITING[:2] if args.quick else WAITING
    model = echo("m", slots=SLOTS, step_s=0.0) | {"max_queue": max(WAITING)}
    with Instance.up(folder, [model, still()]) as instance:
        status = instance.until_settled()
        size = 200 if args.quick else 5_000
        held = held_bytes(status, body("still", max_tokens=500_000, stream=True), size)
        yield Figure(f"memory of the gateway for each of {size} that wait", f"{held / 1e3:.1f} kB")
        order = Order(port(status), PATH, body("m"), 1, (status.gateways[0].pid,))
        costs, bare = beside_bare(args, order, counts)
        yield from rows("requests at once, 64 run and the rest wait: an answer", costs, bare)


def beside_bare(
    args: argparse.Namespace, order: Order, counts: Sequence[int]
) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
    """CPU time of an answer, µs, of the gateway and of a bare app, by turns."""
    command = [sys.executable, "-m", "tests.bench.bare", ANSWER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as app:
        try:
            assert app.stdout is not None
            plain = msgspec.structs.replace(
                order, port=int(app.stdout.readline()), path="/whole", watch=(app.pid,)
            )
            orders = {
                (one, n): msgspec.structs.replace(one, connections=n)
                for n in counts
                for one in (order, plain)
            }
            results = by_turns(args, orders)
        finally:
            app.kill()

    def costs(which: Order) -> dict[int, list[float]]:
        return {n: [one.cpu_s[0] / one.answers * 1e6 for one in results[which, n]] for n in counts}

    return costs(order), costs(plain)


def streams(folder: Path, args: argparse.Namespace) -> Iterator[Figure]:
    counts = STREAMS[:2] if args.quick else STREAMS
    models = [
        echo(f"m{n}", slots=n, max_context=1_000_000, step_s=n / TOKENS_PER_S) for n in counts
    ]
    with Instance.up(folder, [*models, still(slots=max(counts))]) as instance:
        status = instance.until_settled()
        gateway = status.gateways[0].pid
        long = {"max_tokens": 500_000, "stream": True}
        size = counts[-1]
        held = held_bytes(status, body("still", **long), size)
        yield Figure(f"memory of the gateway for each of {size} streams", f"{held / 1e3:.1f} kB")
        orders = {
            n: Order(port(status), PATH, body(f"m{n}", **long), n, (gateway,), stream=True)
            for n in counts
        }
        results = by_turns(args, orders)
        costs = {n: [one.cpu_s[0] / one.tokens * 1e6 for one in results[n]] for n in counts}
        yield from rows("streams, as many tokens each second: a token", costs)


def workers(folder: Path, args: argparse.Namespace) -> Iterator[Figure]:
    counts = WORKERS[:2] if args.quick else WORKERS
    costs: dict[str, dict[int, list[float]]] = {what: {} for what in CLIENTS}
    for n in counts:
        inner = folder / str(n)
        inner.mkdir()
        model = echo("m", replicas=n, slots=SLOTS) | {"standby": False}
        with Instance.up(inner, [model]) as instance:
            status = instance.until_settled(within_s=300)
            watch = (status.gateways[0].pid,)
            orders = {
                what: Order(port(status), PATH, body("m"), clients(n), watch)
                for what, clients in CLIENTS.items()
            }
            for what, results in by_turns(args, orders).items():
                costs[what][n] = [one.cpu_s[0] / one.answers * 1e6 for one in results]
    for what, found in costs.items():
        yield from rows(f"workers, {what}: an answer", found)


def still(slots: int = 1) -> dict[str, object]:
    """A model that holds what it is asked: it goes on for a week."""
    model = echo("still", slots=slots, step_s=2.0, max_context=1_000_000)
    return model | {"max_queue": max(WAITING)}


def held_bytes(status: Status, asked: str, count: int) -> float:
    """What each of so many that ask and wait adds to the gateway's own memory."""
    gateway = status.gateways[0].pid
    order = Order(port(status), PATH, asked, count, (gateway,), stream=True, seconds=600)
    before = memory_bytes(gateway)[1]
    command = [sys.executable, "-m", "tests.bench.load", msgspec.json.encode(order).decode()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as load:
        try:
            poll("all have come", lambda: in_flight(status) >= count, within_s=60)
            return (memory_bytes(gateway)[1] - before) / count
        finally:
            load.kill()


def in_flight(status: Status) -> int:
    ready = httpx.get(f"{status.url}/readyz", timeout=30).json()
    return sum(one["waiting"] + one["running"] for one in ready["models"].values())


def port(status: Status) -> int:
    return urlsplit(status.url).port or 0


def by_turns(args: argparse.Namespace, orders: dict[K, Order]) -> dict[K, list[Result]]:
    results: dict[K, list[Result]] = {n: [] for n in orders}
    for _ in range(1 if args.quick else args.rounds):
        for n, order in orders.items():
            seconds = 0.5 if args.quick else args.seconds
            timed = msgspec.structs.replace(order, seconds=seconds, warm_s=min(1.0, seconds))
            results[n].append(run(timed))
    return results


def rows(
    what: str, costs: dict[int, list[float]], bare: dict[int, list[float]] | None = None
) -> Iterator[Figure]:
    least = next(iter(costs))

    def told(n: int) -> float:
        return statistics.median(costs[n]) / (statistics.median(bare[n]) if bare else 1.0)

    for n, each in costs.items():
        ratio = told(n) / told(least)
        if bare:
            yield Figure(f"{n:,} clients: an answer of a bare app", f"{spread(bare[n], 1)} µs")
        yield Figure(
            f"{n:,} {what}",
            f"{spread(each, 1)} µs",
            "" if n == least else f"≤ 1.2 of {least:,}",
            None if n == least else ratio <= 1.2,
            f"{ratio:.2f}",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="a try, not a measurement")
    args = parser.parse_args(arguments)
    figures: list[Figure] = []
    for name in args.only:
        print(f"measuring: {name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
            figures += globals()[name](Path(folder), args)
    print(f"{conditions()}\n\n{markdown(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
