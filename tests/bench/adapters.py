"""`python -m tests.bench.adapters`: LoRA adapters mixed in one batch, beside the base model.

--device cuda                  by default cpu, where the model is tiny and the figures say little
--shape tiny, 0.35B or 7B      random weights
--requests, --tokens           each request has an adapter, in turn
--adapters 1 8 32              loaded one after another, the first beside a stream of the base
--stacked, --runs              one way of adding them in the library's steps only

A rate is the median of three crowds, prompts included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from servekit.engines.transformers.lora import batched_lora
from servekit.protocol.adapters import AdapterSpec
from tests.gpu.adapters import write_large, write_llama, write_lora, write_middle
from tests.unit.engines.harness import Harness, make_spec

SHAPES: dict[str, Callable[[Path], Path]] = {
    "tiny": partial(write_llama, hidden=256, intermediate=768, layers=4, heads=8),
    "0.35B": write_middle,
    "7B": write_large,
}
ROUNDS = 3
#: Of the GPU, for weights and cache.
MEMORY_BYTES = 60 * 2**30
#: The stream whose gaps are noted, and how often it is looked at.
STREAM_TOKENS = 400
LOOK_S = 0.001


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.adapters")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--stacked", action="store_true")
    parser.add_argument("--runs", action="store_true")
    args = parser.parse_args()
    if args.stacked or args.runs:
        batched_lora._LAUNCH_WORTH = dict.fromkeys(("cpu", "cuda"), 1e18 if args.stacked else -1e18)
    with tempfile.TemporaryDirectory(prefix="servekit-adapters-") as folder:
        measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    base = SHAPES[args.shape](folder / "base")
    paths = [write_lora(base, folder / f"a{n}", n) for n in range(max(args.adapters))]
    on_gpu = args.device == "cuda"
    fields: dict[str, Any] = {"memory_bytes": MEMORY_BYTES} if on_gpu else {}
    dtype = "bfloat16" if on_gpu else "float32"
    engine = Harness(make_spec(base, device=args.device, dtype=dtype, **fields))
    rate = partial(crowd_rate, engine, args.tokens)
    try:
        print(engine.info.detail, flush=True)
        rate([""], args.requests)  # warm
        base_rate, alone = rate([""], args.requests), rate([""], 1)
        print(f"| base | {base_rate:,.0f} tokens/s | {alone:,.0f} alone |", flush=True)
        names: list[str] = []
        for count in sorted(args.adapters):
            began_s = time.monotonic()
            with noted_gaps(engine, wanted=not names) as gaps_s:
                for path in paths[len(names) : count]:
                    engine.engine.load_adapter(AdapterSpec(path.name, str(path)))
                    names.append(path.name)
            took_s = time.monotonic() - began_s
            mixed, one = rate(names, args.requests), rate(names, 1)
            halves, again = rate([*names, *[""] * count], args.requests), rate([""], args.requests)
            beside = f"; a stream's longest gap {max(gaps_s):.3f} s" if gaps_s else ""
            print(
                f"| {count} adapters | {mixed:,.0f} tokens/s | {one:,.0f} alone "
                f"| {mixed / max(base_rate, again):.2f} of the base "
                f"| half of the requests on the base: {halves:,.0f} "
                f"| loaded in {took_s:.1f} s{beside} |",
                flush=True,
            )
    finally:
        engine.close()


def crowd_rate(engine: Harness, tokens: int, names: list[str], requests: int) -> float:
    """Tokens per second, all requests at once."""
    rates = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        jobs = [
            engine.submit(
                f"{number} The history of the city begins",
                adapter=names[number % len(names)],
                max_tokens=tokens,
                ignore_eos=True,
            )
            for number in range(requests)
        ]
        made = sum(len(engine.tokens(job)) for job in jobs)
        rates.append(made / (time.perf_counter() - began_s))
    return statistics.median(rates)


@contextmanager
def noted_gaps(engine: Harness, *, wanted: bool) -> Iterator[list[float]]:
    """The times between the tokens of streams of the base, one after another, s."""
    gaps_s: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            job = engine.submit("The history", max_tokens=STREAM_TOKENS, ignore_eos=True)
            last_s, seen = time.perf_counter(), 0
            while seen < STREAM_TOKENS and not done.wait(LOOK_S):
                now = len(engine.outputs.get(job, ()))
                if now != seen:
                    now_s = time.perf_counter()
                    gaps_s.append(now_s - last_s)
                    last_s, seen = now_s, now

    watcher = threading.Thread(target=watch)
    if wanted:
        watcher.start()
    try:
        yield gaps_s
    finally:
        done.set()
        if wanted:
            watcher.join()


if __name__ == "__main__":
    main()
