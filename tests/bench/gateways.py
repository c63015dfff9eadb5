"""Two gateways against one: they share a port, and the kernel spreads the connections.

    python -m tests.bench.gateways [--rounds 5] [--seconds 2]

Requests flat out, and streams that are steady: of some rates the highest at which each token has a
write of its own. (Where tokens share writes, the workers and the clients are the limit long before
one gateway is.)

Wants four cores or more: two gateways, four workers and four load generators in one machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servekit.protocol.messages import Status
from tests.bench import noop, streaming
from tests.bench.figures import conditions
from tests.bench.load import Order, run
from tests.bench.table import Figure, markdown, spread
from tests.integration.instance import Instance, echo

GENERATORS = 4
CONNECTIONS = 64
WORKERS = 4
AIM = 1.7
#: Tokens a second of all streams that the steady ones are set to, by the number of gateways.
STEADY = {
    1: tuple(range(140_000, 260_000, 20_000)),
    2: tuple(range(260_000, 500_000, 40_000)),
}


@dataclass(frozen=True, slots=True)
class Round:
    """What all load generators saw together."""

    rate: float  # answers or tokens, a second
    tokens_a_write: float
    cpu_s: tuple[float, ...]  # of each gateway

    @property
    def evenness(self) -> float:
        """The least busy gateway's CPU time as a share of the busiest's."""
        return min(self.cpu_s) / max(self.cpu_s)


def ask(status: Status, path: str, body: str, seconds: float, *, stream: bool) -> Round:
    """Have all load generators ask at once."""
    port = urlsplit(status.url).port or 0
    gateways = [one.pid for one in status.gateways]
    # a generator counts the writes of the first that it watches: each gateway is one's first
    watched = [tuple(gateways[at:] + gateways[:at]) for at in range(len(gateways))]
    orders = [
        Order(port, path, body, CONNECTIONS, watched[at % len(watched)], stream, seconds, 1.0)
        for at in range(GENERATORS)
    ]
    with ThreadPoolExecutor(GENERATORS) as threads:
        results = list(threads.map(run, orders))
    firsts = results[: len(gateways)]
    tokens = sum(one.tokens for one in results)
    return Round(
        sum(one.tokens_per_s if stream else one.answers_per_s for one in results),
        tokens / max(1, sum(one.writes for one in firsts)),
        tuple(one.cpu_s[0] for one in firsts),
    )


def models(gateways: int) -> list[dict[str, Any]]:
    streams = GENERATORS * CONNECTIONS
    steady = [
        echo(str(rate), replicas=WORKERS, slots=512, max_context=100_000, step_s=streams / rate)
        for rate in STEADY[gateways]
    ]
    return [echo("whole", replicas=WORKERS), *steady]


def measure(status: Status, gateways: int, seconds: float) -> dict[str, Round]:
    """By the model's name."""
    body = noop.BODY.replace("echo", "whole")
    found = {"whole": ask(status, noop.PATH, body, seconds, stream=False)}
    for name in map(str, STEADY[gateways]):
        body = streaming.body(name)
        found[name] = ask(status, noop.PATH, body, seconds, stream=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateways", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args(arguments)
    rounds: dict[int, dict[str, list[Round]]] = {1: {}, 2: {}}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="servekit-bench-")))
        up = {}
        for gateways in rounds:
            (own := folder / str(gateways)).mkdir()
            server = {"gateways": gateways}
            instance = stack.enter_context(Instance.up(own, models(gateways), server=server))
            up[gateways] = instance.until_settled(within_s=120)
        for _ in range(args.rounds):
            for gateways, status in up.items():
                for name, found in measure(status, gateways, args.seconds).items():
                    rounds[gateways].setdefault(name, []).append(found)
    print(f"{conditions()}\n\n{markdown(_rows(rounds))}")
    return 0


def _rows(rounds: dict[int, dict[str, list[Round]]]) -> list[Figure]:
    whole = {gateways: found.pop("whole") for gateways, found in rounds.items()}
    steady = {gateways: _best(list(found.values())) for gateways, found in rounds.items()}
    return [
        _row("requests/s", whole),
        _row("streamed tokens/s, a write for each,", steady),
    ]


def _best(found: Sequence[list[Round]]) -> list[Round]:
    """The rounds of the highest rate at which tokens don't share writes."""

    def rate(one: list[Round]) -> float:
        return statistics.median(round.rate for round in one)

    alone = [
        one
        for one in found
        if statistics.median(round.tokens_a_write for round in one) <= streaming.ALONE
    ]
    return max(alone, key=rate) if alone else min(found, key=rate)


def _row(what: str, found: dict[int, list[Round]]) -> Figure:
    one, two = ([round.rate for round in found[gateways]] for gateways in (1, 2))
    ratio = statistics.median(two) / statistics.median(one)
    shared = [
        statistics.median(round.tokens_a_write for round in found[gateways]) for gateways in (1, 2)
    ]
    even = spread([round.evenness for round in found[2]])
    return Figure(
        f"{what} of two gateways against one, {GENERATORS * CONNECTIONS} connections",
        f"{ratio:.2f}; {spread(two, 0)} against {spread(one, 0)}",
        f"≥ {AIM}",
        ratio >= AIM and max(shared) <= streaming.ALONE,
        f"the less busy gateway took {even} of the other's CPU time"
        + (f"; {shared[1]:.2f} and {shared[0]:.2f} tokens a write" if shared[0] else ""),
    )


if __name__ == "__main__":
    sys.exit(main())
