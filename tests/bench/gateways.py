"""Two gateways against one: they share a port, and the kernel spreads the connections.

    python -m tests.bench.gateways [--rounds 5] [--seconds 2]

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
from pathlib import Path
from urllib.parse import urlsplit

from servekit.wire.messages import Status
from tests.bench import noop, streaming
from tests.bench.figures import conditions
from tests.bench.load import Order, Result, run
from tests.bench.table import Figure, markdown, spread
from tests.integration.instance import Instance, echo

GENERATORS = 4
CONNECTIONS = 64
AIM = 1.7


def orders(status: Status, seconds: float, *, stream: bool) -> list[Order]:
    """What each load generator asks for; every one watches all gateways."""
    port = urlsplit(status.url).port or 0
    gateways = tuple(one.pid for one in status.gateways)
    if stream:
        asked = "/v1/completions", streaming.body("turns")
    else:
        asked = noop.PATH, noop.BODY.replace("echo", "whole")
    order = Order(port, *asked, CONNECTIONS, gateways, stream, seconds, 1.0)
    return [order] * GENERATORS


def together(asked: list[Order]) -> list[Result]:
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(run, asked))


def rate(results: list[Result], *, stream: bool) -> float:
    return sum(one.tokens_per_s if stream else one.answers_per_s for one in results)


def evenness(results: list[Result]) -> float:
    """The least busy gateway's CPU time as a share of the busiest's."""
    busy = [statistics.median(one.cpu_s[at] for one in results) for at in (0, 1)]
    return min(busy) / max(busy)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateways", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args(arguments)
    models = [
        echo("whole", replicas=4),
        echo("turns", replicas=4, slots=512, max_context=100_000, step_s=0.0001),
    ]
    rates: dict[tuple[int, bool], list[float]] = {}
    even: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="servekit-bench-")))
        up = {}
        for gateways in (1, 2):
            (own := folder / str(gateways)).mkdir()
            server = {"gateways": gateways}
            instance = stack.enter_context(Instance.up(own, models, server=server))
            up[gateways] = instance.until_settled()
        for _ in range(args.rounds):
            for stream in (False, True):
                for gateways, status in up.items():
                    results = together(orders(status, args.seconds, stream=stream))
                    rates.setdefault((gateways, stream), []).append(rate(results, stream=stream))
                    if gateways == 2:
                        even[stream].append(evenness(results))
    print(f"{conditions()}\n\n{markdown(_rows(rates, even))}")
    return 0


def _rows(
    rates: dict[tuple[int, bool], list[float]], even: dict[bool, list[float]]
) -> list[Figure]:
    rows = []
    for stream, what in ((False, "requests/s"), (True, "streamed tokens/s")):
        one, two = rates[1, stream], rates[2, stream]
        ratio = statistics.median(two) / statistics.median(one)
        rows.append(
            Figure(
                f"{what} of two gateways against one, {GENERATORS * CONNECTIONS} connections",
                f"{ratio:.2f}; {statistics.median(two):,.0f}/s against "
                f"{statistics.median(one):,.0f}/s; by round "
                f"{spread([b / a for a, b in zip(one, two, strict=True)])}",
                f"≥ {AIM}",
                ratio >= AIM,
                f"the less busy gateway took {spread(even[stream])} of the other's CPU time",
            )
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
