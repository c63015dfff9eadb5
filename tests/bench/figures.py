"""Measures what DESIGN.md promises in figures, and prints a Markdown table.

    python -m tests.bench.figures [--rounds 5] [--seconds 2] [--only noop deaths …] [--quick]

Ratios are of medians over rounds taken by turns on the same machine; the spread is the least and
the greatest round. Real processes, loopback only, and nothing left running. The figures against
`transformers serve` have a command of their own, `python -m tests.bench.transformers_serve`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench import deaths, footprint, noop, orphans, streaming
from tests.bench.contest import Plan
from tests.bench.table import Figure, markdown

Part = Callable[[Path, Plan], Iterator[Figure]]

PARTS: dict[str, Part] = {
    "noop": noop.figures,
    "streaming": streaming.figures,
    "deaths": deaths.figures,
    "orphans": orphans.figures,
    "footprint": footprint.figures,
}


def collect(names: Sequence[str], plan: Plan) -> Iterator[Figure]:
    """The figures of these parts, each in a directory of its own that goes away again."""
    for name in names:
        print(f"measuring: {name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
            yield from PARTS[name](Path(folder), plan)


def conditions() -> str:
    """One line about the machine and how busy it is."""
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    return (
        f"{platform.platform()}, Python {platform.python_version()}, "
        f"{len(os.sched_getaffinity(0))} cores, load average {loads}"
    )


def _plan(options: argparse.Namespace) -> Plan:
    if options.quick:
        return Plan.smoke()
    return Plan(options.rounds, options.seconds, options.calm_within, wide=options.wide)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.figures", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each comparison; at least 5")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument(
        "--calm-within",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="before each measurement, wait at most this long for the machine to be idle",
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--wide", action="store_true", help="1, 32 and 512 streams as well")
    parser.add_argument("--quick", action="store_true", help="see that it works; no real figures")
    options = parser.parse_args(arguments)
    if options.rounds < 5 and not options.quick:
        parser.error("--rounds must be at least 5")
    before, began = conditions(), time.monotonic()
    table = markdown(collect(options.only, _plan(options)))
    print(f"Before: {before}\n\n{table}\n\nAfter {time.monotonic() - began:.0f} s: {conditions()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
