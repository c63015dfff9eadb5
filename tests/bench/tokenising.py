"""What tokenising a prompt costs, by library, and how long it keeps an event loop waiting.

    python -m tests.bench.tokenising [--rounds 9]

SmolLM2's tokenizer, which a start of configs/demo.yaml has left in the cache. The first table is
CPU time of the thread that tokenises, the least of the rounds. For the second, a loop wakes every
millisecond, as with running streams, while prompts of 5,000 tokens arrive one after another: by
turns tokenised on the loop by transformers, and as a worker does it. The third is fastokens with
one thread and with as many as it starts by default, each in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transformers import AutoTokenizer

from servekit.engines.text.text_encoder import TextEncoder
from tests.bench.figures import conditions
from tests.bench.transformers_serve import cached_model

#: Tokens of the prompts of the first table, and of the third.
SIZES = (140, 5000)
LONG = (5_000, 30_000, 100_000)
PROMPTS = 10
TICK_S = 0.001
WORDS = ["the", "answer", "of", "a", "server", "is", "sent", "and", "clients", "read", "it"]


def make_text(tokens: int, source: random.Random, *, known: bool = True) -> str:
    """A text of about so many tokens: of common words, or of random letters."""
    if known:
        return " ".join(source.choices(WORDS, k=tokens))
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(source.choices(letters, k=5)) for _ in range(tokens * 3 // 8))


def cost_us(encode: Callable[[str, bool], list[int]], texts: Sequence[str]) -> float:
    began = time.thread_time()
    for text in texts:
        encode(text, False)
    return 1e6 * (time.thread_time() - began) / len(texts)


def print_costs(ways: dict[str, Callable[[str, bool], list[int]]], rounds: int) -> None:
    source = random.Random(1)
    for tokens in SIZES:
        for known in (True, False):
            least = dict.fromkeys(ways, float("inf"))
            for _ in range(rounds):
                texts = [make_text(tokens, source, known=known) for _ in range(5)]
                for name, encode in ways.items():
                    least[name] = min(least[name], cost_us(encode, texts))
            kind = "known words" if known else "random letters"
            told = ", ".join(f"{name} {us:,.0f} µs" for name, us in least.items())
            print(f"{tokens} tokens, {kind}: {told}", flush=True)


async def measure_gap_s(tokenise: Callable[[str], Awaitable[Any]], source: random.Random) -> float:
    """The 99th percentile of the time between two ticks of the loop."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    for text in [make_text(5000, source) for _ in range(PROMPTS)]:
        await asyncio.sleep(5 * TICK_S)
        await tokenise(text)
    ticking.cancel()
    return statistics.quantiles(gaps, n=100)[98]


async def print_gaps(ways: dict[str, Callable[[str, bool], list[int]]], rounds: int) -> None:
    loop, source = asyncio.get_running_loop(), random.Random(2)

    async def on_loop(text: str) -> None:
        ways["transformers"](text, False)

    with ThreadPoolExecutor(1) as pool:

        def aside(name: str) -> Callable[[str], Awaitable[Any]]:
            return lambda text: loop.run_in_executor(pool, ways[name], text, False)

        turns: dict[str, Callable[[str], Awaitable[Any]]] = {"transformers on the loop": on_loop}
        turns |= {f"{name} in a thread": aside(name) for name in ways}
        found: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(rounds):
            for name, tokenise in turns.items():
                found[name].append(await measure_gap_s(tokenise, source))
    first = statistics.median(found["transformers on the loop"])
    for name, gaps in found.items():
        median = statistics.median(gaps)
        spread = f"{1e3 * min(gaps):.1f} to {1e3 * max(gaps):.1f}"
        print(f"p99 gap, {name}: {1e3 * median:.1f} ms ({spread}), {median / first:.2f}")


def print_threads(rounds: int) -> None:
    """Tell time and CPU time of all threads, of long prompts with one thread and with many."""
    for threads in ("1", ""):
        command = (sys.executable, "-m", "tests.bench.tokenising", "--threads-of-this", str(rounds))
        subprocess.run(command, env={**os.environ, "FASTOKENS_BPE_THREADS": threads}, check=True)


def print_own_threads(encode: Callable[[str, bool], list[int]], rounds: int) -> None:
    source = random.Random(3)
    for tokens in LONG:
        texts = [make_text(tokens, source) for _ in range(5 * rounds)]
        took_ms = []
        used_s = time.process_time()
        for text in texts:
            began = time.perf_counter()
            encode(text, False)
            took_ms.append(1e3 * (time.perf_counter() - began))
        used_ms = 1e3 * (time.process_time() - used_s) / len(texts)
        threads = os.environ["FASTOKENS_BPE_THREADS"] or "default"
        median = statistics.median(took_ms)
        print(
            f"threads {threads}, {tokens:,} tokens: {median:.2f} ms, CPU {used_ms:.2f}", flush=True
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tokenising", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads-of-this", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    rounds = args.rounds
    encoder = TextEncoder(AutoTokenizer.from_pretrained(cached_model()))
    ways = {"transformers": encoder.encode}
    encoder.prove_libraries()
    if args.threads_of_this:
        print_own_threads(encoder.encode, args.threads_of_this)
        return 0
    ways |= {"tokenizers": encoder.reserve, encoder.library: encoder.encode}
    print(conditions())
    print_costs(ways, rounds)
    asyncio.run(print_gaps(ways, rounds))
    print_threads(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
