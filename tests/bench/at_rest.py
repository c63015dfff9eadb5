"""CPU time and wake-ups of each process of the demo while nobody asks for anything.

    python -m tests.bench.at_rest [--seconds 300] [--echo]

With `--echo` it serves a model of the echo engine, which costs nothing. The instance settles for
100 s first, since it takes a while until it rests. CPU time is the scheduler's own count, in
nanoseconds; a wake-up is a voluntary context switch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import yaml

from tests.bench.figures import conditions
from tests.integration.instance import Instance, echo

ROOT = Path(__file__).parents[2]
SETTLED_S = 100.0


def read_use(pid: int) -> tuple[int, int]:
    """Return a process's CPU time in ns and its voluntary context switches, of all threads."""
    cpu_ns = switches = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            cpu_ns += int((thread / "schedstat").read_text().split()[0])
            lines = (thread / "status").read_text().splitlines()
            told = next(one for one in lines if one.startswith("voluntary_ctxt_switches"))
            switches += int(told.split()[1])
    return cpu_ns, switches


def list_processes(instance: Instance) -> Iterator[tuple[str, int]]:
    status = instance.status()
    yield "supervisor", status.pid
    yield from ((one.name, one.pid) for one in status.gateways)
    yield from ((one.name, one.pid) for model in status.models for one in model.replicas)


def print_row(name: str, cpu_ns: int, wakes: int, seconds: float) -> None:
    print(f"| {name} | {cpu_ns / 1e6 / seconds:.2f} | {wakes / seconds:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--echo", action="store_true", help="serve a model of the echo engine")
    options = parser.parse_args()
    models = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["models"]
    models = [echo("a")] if options.echo else models
    with (
        tempfile.TemporaryDirectory() as folder,
        Instance.up(Path(folder), models, server={"ui": True}) as instance,
    ):
        instance.until_settled(within_s=300)
        processes = dict(list_processes(instance))
        time.sleep(SETTLED_S)  # nothing tells that it rests
        before = {name: read_use(pid) for name, pid in processes.items()}
        time.sleep(options.seconds)  # what is measured
        print("| process | CPU, ms/s | wake-ups/s |\n|---|---|---|")
        all_ns = all_wakes = 0
        for name, pid in processes.items():
            cpu_ns, wakes = (
                new - old for new, old in zip(read_use(pid), before[name], strict=True)
            )
            all_ns, all_wakes = all_ns + cpu_ns, all_wakes + wakes
            print_row(name, cpu_ns, wakes, options.seconds)
        print_row("all", all_ns, all_wakes, options.seconds)
    print(f"\n{conditions()}")


if __name__ == "__main__":
    main()
