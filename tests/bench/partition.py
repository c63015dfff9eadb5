"""What the network does to requests: time to notice, longest break, time to be whole again.

    python -m tests.bench.partition [--rounds 3] [--lost-s 5]

A gateway and its supervisor on one machine, three echo workers on three others, behind a cable
each (`tests.integration.network`); six streams with a token every 10 ms. One worker's process is
killed, its cable unplugged for ten seconds, or its power cut. Every stream has to end with its
whole text. Whole again is when as many workers serve as before: the same one where it comes back,
else another that is started when the supervisor takes the first for lost. Then tokens per second
over a Unix socket, over TCP with TLS, and over links that are far or slow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from tests.bench.cpu import cpu_s
from tests.bench.figures import conditions
from tests.bench.table import Figure, markdown, spread
from tests.integration import network
from tests.integration.cluster import DEADLINE_S, Cluster, Node
from tests.integration.instance import Instance, echo

STEP_S = 0.01
STREAMS = 6
PROMPT = "abcdefghij"
UNPLUGGED_S = 10.0
#: Streams and their tokens, for tokens per second.
MANY, LONG = 16, 1500
#: As supervisors ping.
_PING_S = 1.0


@dataclass(slots=True)
class Times:
    """Seconds from the fault, one for each round."""

    gateway: list[float] = field(default_factory=list)
    supervisor: list[float] = field(default_factory=list)
    break_: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def said_at(cluster: Cluster, what: str, name: str) -> list[float]:
    """Unix times at which the gateway's log says that of a worker."""
    lines = [json.loads(line) for line in cluster.said.splitlines() if line.startswith("{")]
    return [
        datetime.fromisoformat(line["timestamp"]).timestamp()
        for line in lines
        if line["event"] == what and line.get("worker") == name
    ]


async def longest_break(cluster: Cluster, tokens: int) -> float:
    """Between two pieces of a stream, beyond its step."""
    longest_s, last, text = 0.0, 0.0, ""
    async for piece in cluster.stream(PROMPT, tokens):
        now = time.perf_counter()
        longest_s, last, text = max(longest_s, now - (last or now)), now, text + piece
    assert text == PROMPT * (tokens // len(PROMPT)), "a stream was not whole"
    return longest_s - STEP_S


async def _pinging(cluster: Cluster) -> None:
    while True:
        for node in cluster.nodes:
            node.ping()
        await asyncio.sleep(_PING_S)


async def one_round(cluster: Cluster, kind: str, lost_s: float, times: Times) -> None:
    nodes = await asyncio.gather(
        *(cluster.ready(f"echo/{n}", apart=n + 1, step_s=STEP_S) for n in range(3))
    )
    await cluster.gateway()
    await cluster.connected(3)
    pinging = asyncio.create_task(_pinging(cluster))
    tokens = 10 * round(10 * (lost_s + 3))
    streams = [asyncio.create_task(longest_break(cluster, tokens)) for _ in range(STREAMS)]
    await asyncio.gather(*(node.until_busy() for node in nodes))
    victim = nodes[0]
    began = time.time()
    _hurt(victim, kind)
    if kind == "unplugged":
        await _plug_in(cluster, victim, began, times)
    else:
        await _replace(cluster, victim, began, times)
    times.break_.append(max(await asyncio.wait_for(asyncio.gather(*streams), DEADLINE_S)))
    times.gateway.append(said_at(cluster, "worker_lost", victim.name)[0] - began)
    pinging.cancel()


def _hurt(victim: Node, kind: str) -> None:
    match kind:
        case "killed":
            victim.kill()
        case "unplugged":
            victim.wire.down()
        case _:
            victim.wire.say(cut=True)


async def _plug_in(cluster: Cluster, victim: Node, began: float, times: Times) -> None:
    await asyncio.sleep(UNPLUGGED_S)
    assert victim.child is not None
    assert not victim.child.exited.done(), "it was taken for lost"
    plugged = time.time()
    victim.wire.up()
    await cluster.connected(4)
    times.whole.append(said_at(cluster, "worker_connected", victim.name)[1] - plugged)


async def _replace(cluster: Cluster, victim: Node, began: float, times: Times) -> None:
    assert victim.child is not None
    await asyncio.wait_for(asyncio.shield(victim.child.exited), DEADLINE_S)
    times.supervisor.append(time.time() - began)
    await cluster.ready("echo/3", apart=4, step_s=STEP_S)
    cluster.publish()
    await cluster.connected(4)
    times.whole.append(said_at(cluster, "worker_connected", "echo/3")[0] - began)


def faults(rounds: int, lost_s: float) -> Iterator[Figure]:
    kinds = {
        "killed": "its processes are killed (kill -9)",
        "unplugged": f"its cable is unplugged for {UNPLUGGED_S:g} s",
        "powerless": "its power is cut: no FIN, no RST",
    }
    for kind, what in kinds.items():
        times = Times()
        for _ in range(rounds):
            network.elsewhere(partial(_alone, kind, lost_s, times))
        yield Figure(f"{what}: noticed by the gateway", spread(times.gateway, unit=" s"))
        yield Figure("… longest break in a stream", spread(times.break_, unit=" s"))
        if times.supervisor:
            yield Figure("… taken for dead by the supervisor", spread(times.supervisor, unit=" s"))
        plugged = (
            "from when it is plugged in" if kind == "unplugged" else "a new worker's start in it"
        )
        yield Figure("… whole again", spread(times.whole, unit=" s"), how=plugged)


async def _alone(kind: str, lost_s: float, times: Times) -> None:
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        async with Cluster(Path(folder), lost_s=lost_s, node_lost_s=2 * lost_s + 5) as cluster:
            await one_round(cluster, kind, lost_s, times)


# ---------------------------------------------------------------- throughput


@dataclass(frozen=True, slots=True)
class Rate:
    """Of many streams at once."""

    tokens_per_s: float
    cpu_us: float  # of the gateway and the worker together, for a token


async def rate(cluster: Cluster, pids: Sequence[int]) -> Rate:
    await cluster.complete(PROMPT, 100)
    before_s, began = sum(map(cpu_s, pids)), time.perf_counter()
    texts = await asyncio.gather(*(cluster.complete(PROMPT, LONG) for _ in range(MANY)))
    took_s, cpu = time.perf_counter() - began, sum(map(cpu_s, pids)) - before_s
    assert set(texts) == {PROMPT * (LONG // len(PROMPT))}
    return Rate(MANY * LONG / took_s, cpu / (MANY * LONG) * 1e6)


def links(rounds: int) -> Iterator[Figure]:
    ways: dict[str, dict[str, Any] | None] = {
        "TCP and TLS, on this machine": None,
        "50 ms there and back": {"delay_s": 0.025},
        "10 Mbit/s, 20 ms there and back": {"delay_s": 0.01, "bytes_per_s": 1.25e6},
    }
    base = [over_unix() for _ in range(rounds)]
    yield _row("a Unix socket", base)
    for what, how in ways.items():
        yield _row(what, [network.elsewhere(partial(_over, how)) for _ in range(rounds)])


def _row(what: str, rates: Sequence[Rate]) -> Figure:
    told = f"{spread([one.tokens_per_s for one in rates], 0)}; "
    told += spread([one.cpu_us for one in rates], 1, " µs")
    return Figure(f"over {what}: tokens/s; CPU of gateway and worker for each", told)


async def _over(how: dict[str, Any] | None) -> Rate:
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        async with Cluster(Path(folder)) as cluster:
            node = await cluster.ready("echo/0", apart=0 if how is None else 1)
            if how:
                node.wire.say(**how)
            await cluster.gateway()
            await cluster.connected(1)
            return await rate(cluster, [cluster.gateway_pid, node.process.pid])


def over_unix() -> Rate:
    with (
        tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder,
        Instance.up(Path(folder), [echo("echo")]) as instance,
    ):
        instance.until_settled()
        cluster = Cluster(Path(folder))
        cluster.url = instance.url
        [gateway] = instance.status().gateways
        [worker] = instance.model("echo").replicas
        return asyncio.run(rate(cluster, [gateway.pid, worker.pid]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.partition", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lost-s", type=float, default=5.0)
    args = parser.parse_args(arguments)
    if network.why_not():
        sys.exit(network.why_not())
    parts: list[Callable[[], Iterator[Figure]]] = [
        lambda: faults(args.rounds, args.lost_s),
        lambda: links(args.rounds),
    ]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    print(f"{conditions()}\n")
    for part in parts:
        print(markdown(part()), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
