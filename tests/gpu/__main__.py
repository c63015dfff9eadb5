"""`python -m tests.gpu --model PATH`: the whole GPU run, as one table.

--model PATH     a folder, a .gguf file or any other `path` of the configuration
--device cpu     try the script itself where there is no GPU
--replicas N     by default one per GPU
--only adapters  the adapters alone; `rest`: all but these

The model is served as it is, then once more for its adapters; numbers of CPU and GPU are compared
last, when nothing else holds memory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.gpu import adapters, checks
from tests.gpu.checks import Row, gpu_count, model, serving


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--dtype", default=checks.DTYPE)
    parser.add_argument("--only", choices=["adapters", "rest"])
    args = parser.parse_args()
    checks.DTYPE = args.dtype
    replicas = args.replicas or max(1, gpu_count())
    rows: list[Row] = []
    if args.only != "adapters":
        rows += as_it_is(args, replicas)
    if args.only != "rest":
        rows += with_adapters(args, replicas)
        rows += show(adapters.numerics(args.model, args.device))
    return 0 if all(row.ok is not False for row in rows) else 1


def as_it_is(args: argparse.Namespace, replicas: int) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as folder:
        entry = model(args.model, args.device, replicas)
        with serving(Path(folder), entry) as instance:
            info = instance.model("m").info
            timings = instance.model("m").replicas[0].timings_s
            print(f"{replicas} × {info}\n{timings}", flush=True)
            for check in checks.checks(args.device, args.clients):
                rows += show(check(instance))
    return rows


def with_adapters(args: argparse.Namespace, replicas: int) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as folder:
        base = adapters.folder_of(args.model)
        paths = [adapters.write_lora(base, Path(folder) / f"lora-{n}", n) for n in range(32)]
        entry = model(args.model, args.device, replicas)
        with serving(Path(folder), entry, runtime_adapters=True) as instance:
            rows += show(adapters.loads(instance, paths[: adapters.LOADS]))
            rows += show(adapters.throughput(instance, paths, args.clients))
        if args.device == "cuda" and gpu_count() > 1:
            rows += show(adapters.plain_way(paths[0]))
    return rows


def show(rows: list[Row]) -> list[Row]:
    marks = {True: "yes", False: "NO", None: ""}
    for row in rows:
        print(f"| {row.what:<58} | {row.measured:<42} | {marks[row.ok]:<3} |", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
