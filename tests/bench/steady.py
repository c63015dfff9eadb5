"""Memory over an hour of steady traffic: does any process of an instance grow?

    python -m tests.bench.steady [--minutes 60] [--rate 60]

An instance of two echo workers is asked by `servekit bench`, with Poisson arrivals: streams of 16
to 128 tokens, whole answers beside them, and clients that leave in the midst. Each minute the
anonymous memory of every process is read: its heap, and nothing that others share. The first fifth
is warm-up; a process is flat where the median of the last fifth is at most 2 % or 1 MB above that
of the second.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from servekit.protocol.messages import Status
from tests.bench.cpu import heap_bytes
from tests.bench.figures import conditions
from tests.bench.table import Figure, markdown
from tests.integration.instance import PROGRAM, Instance, echo

SLACK = 0.02
SLACK_BYTES = 1_000_000


def processes(instance: Instance, status: Status) -> dict[str, int]:
    """Name → PID."""
    found = {"supervisor": instance.pid}
    found |= {one.name: one.pid for one in status.gateways}
    return found | {one.name: one.pid for model in status.models for one in model.replicas}


@contextmanager
def asking(url: str, seconds: float, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*PROGRAM, "bench", url, "--model", "echo", "--duration", f"{seconds:.0f}s", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as bench:
        try:
            yield bench
        finally:
            bench.kill()


def leave(url: str, over: threading.Event) -> None:
    """Begin streams and leave in the midst, five a second."""
    asked = {"model": "echo", "prompt": "x" * 400, "max_tokens": 4000, "stream": True}
    while not over.wait(0.2):
        with (
            httpx.Client(base_url=url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=asked) as stream,
        ):
            next(stream.iter_bytes())


def sample(folder: Path, args: argparse.Namespace) -> tuple[dict[str, list[int]], str]:
    """Bytes of each process, minute after minute, and what the load generator said at its end."""
    seconds = 60.0 * args.minutes
    every_s = seconds / max(10, int(args.minutes))
    mix = ("--prompt-tokens", "64..256", "--output-tokens", "16..128", "--ignore-eos")
    with ExitStack() as stack:
        instance = stack.enter_context(
            Instance.up(folder, [echo("echo", replicas=2, slots=64, step_s=0.005)])
        )
        status = instance.until_settled()
        url = status.url
        pids = processes(instance, status)
        seen: dict[str, list[int]] = {name: [] for name in pids}
        rate = ("--rate", f"{args.rate / 2:g}")
        streams = stack.enter_context(asking(url, seconds, *mix, *rate))
        stack.enter_context(asking(url, seconds, *mix, *rate, "--no-stream"))
        over = threading.Event()
        leaver = threading.Thread(target=leave, args=(url, over), daemon=True)
        leaver.start()
        began_s = time.monotonic()
        while (now_s := time.monotonic() - began_s) < seconds:
            time.sleep(min(every_s, seconds - now_s))
            for name, pid in pids.items():
                seen[name].append(heap_bytes(pid))
        over.set()
        leaver.join()
        said = streams.communicate()[0].decode(errors="replace")
        assert httpx.get(f"{url}/readyz", timeout=30).status_code == 200
        return seen, said


def rows(seen: dict[str, list[int]]) -> Iterator[Figure]:
    for name, sizes in seen.items():
        fifth = max(1, len(sizes) // 5)
        before = statistics.median(sizes[fifth : 2 * fifth])
        after = statistics.median(sizes[-fifth:])
        grown = after - before
        yield Figure(
            f"{name}: anonymous memory, second fifth → last fifth",
            f"{before / 1e6:.1f} → {after / 1e6:.1f} MB ({grown / before:+.1%})",
            "flat",
            grown <= max(SLACK * before, SLACK_BYTES),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.steady", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        seen, said = sample(Path(folder), args)
    print(f"{said[max(0, said.find('http://')) :]}\n{conditions()}\n\n{markdown(rows(seen))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
