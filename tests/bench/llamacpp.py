"""`python -m tests.bench.llamacpp`: llama.cpp against transformers, one GGUF file, on the CPU.

--model PATH    as the file has it; by default SmolLM2-135M-Instruct in Q4_1
--tokens, --rounds, --threads    of each answer; how often; of each engine

Greedy, 1 and 8 requests at once, the engines by turns, each alone while it is measured. How long
each takes to load is shown beside it, its imports aside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from servekit.engines.model_files.source import resolve_folder
from tests.bench.table import spread
from tests.unit.engines.conftest import llamacpp
from tests.unit.engines.harness import Harness, make_spec
from tests.unit.engines.origins import SMOLLM2

CLIENTS = (1, 8)
PROMPT = "The sea is {0} and {0}, and whoever has seen it knows that it is {0}. "


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.llamacpp")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    engines, loads = _load(args.model, args.threads)
    try:
        rates = _measure(engines, args.tokens, args.rounds)
    finally:
        for engine in engines.values():
            engine.close()
    for name, load_s in loads.items():
        print(f"| {name} | loaded in {load_s:.1f} s |")
    for clients in CLIENTS:
        ours, theirs = (rates[name, clients] for name in engines)
        ratio = statistics.median(ours) / statistics.median(theirs)
        print(
            f"| {clients} clients | llamacpp {spread(ours, 0)} tokens/s | "
            f"transformers {spread(theirs, 0)} | {ratio:.1f} |"
        )


def _load(model: str, threads: int) -> tuple[dict[str, Harness], dict[str, float]]:
    folder = resolve_folder(model, None, lambda progress: None)  # converted once, and not counted
    makers: dict[str, Callable[[], Harness]] = {
        "llamacpp": lambda: llamacpp(
            model, {"threads": threads, "cache_type": "f16", "flash_attention": "auto"}
        ),
        "transformers": lambda: Harness(make_spec(folder, options={"threads": threads})),
    }
    engines, loads = {}, {}
    for name, make in makers.items():
        began = time.monotonic()
        engines[name] = make()
        loads[name] = time.monotonic() - began
    return engines, loads


def _measure(
    engines: dict[str, Harness], tokens: int, rounds: int
) -> dict[tuple[str, int], list[float]]:
    rates: dict[tuple[str, int], list[float]] = {}
    for name, engine in engines.items():
        _rate(engine, 8, 4, name)  # warm
    for turn in range(rounds):
        for clients in CLIENTS:
            for name, engine in engines.items():
                rate = _rate(engine, clients, tokens, f"{turn}")
                rates.setdefault((name, clients), []).append(rate)
    return rates


def _rate(engine: Harness, clients: int, tokens: int, mark: str) -> float:
    """Tokens per second; no prompt has been seen before."""
    wanted: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    began = time.monotonic()
    jobs = [
        engine.submit(PROMPT.format(f"{mark} {clients} {index}"), **wanted)
        for index in range(clients)
    ]
    made = sum(len(engine.tokens(job)) for job in jobs)
    return made / (time.monotonic() - began)


if __name__ == "__main__":
    main()
