"""How tokens/s grow with GPUs: one replica on each, the same load for each, streamed, by turns.

    python -m tests.bench.replicas [--model PATH] [--streams 128] [--prompt 64] [--output 256]

One instance serves the same model once on 1, 2, 4 … of the machine's GPUs, so many as there are;
each has a share of its GPUs' memory. One of them has work at a time, with so many streams for each
of its replicas. The clients are as many for each replica, too, and say so if they are the limit.

--model    a folder of safetensors; by default a random Llama of 0.35e9 parameters in bfloat16
--gpus N   no more than these; `--engine echo --gpus 2` tries the script itself, without a GPU
--offline  also measure vLLM's own `LLM.generate` in as many processes, one on each GPU: what the
           machine and vLLM allow
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servekit.system.gpu.gpus import find_gpus
from tests.bench.crowd import Order, Round, ask
from tests.bench.figures import conditions
from tests.bench.offline import Offline
from tests.bench.table import Figure, markdown, spread
from tests.bench.vllm import (
    KV_BYTES,
    PATHS,
    SLOTS,
    STEP_TOKENS,
    Load,
    Turn,
    make_arguments,
    vocabulary,
)
from tests.integration.instance import Instance

AIM = 0.97
CLIENTS = 4  # processes, for each replica
#: The models that share a GPU are one for each number of GPUs.
SHARE = 0.28
#: Those of one contestant, by the number of GPUs.
Rounds = dict[int, list[Round]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.replicas", description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engine", choices=("vllm", "transformers", "echo"), default="vllm")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--streams", type=int, default=128, help="of each replica")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=4, help="requests of each stream, a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args(arguments)
    there = options.gpus if options.engine == "echo" else min(options.gpus, len(find_gpus()))
    counts = [count for count in (1, 2, 4, 8) if count <= there]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="servekit-bench-"))
        model = options.model or _made(options.engine, Path(folder) / "model")
        load = Load(options.prompt, options.output, options.repeats, vocabulary(model), CLIENTS)
        models = [_entry(options.engine, model, count) for count in counts]
        server = {"gateways": options.gateways}
        instance = stack.enter_context(Instance.up(Path(folder), models, server=server))
        status = instance.until_settled(within_s=400)
        states = {one.name: one.state for model in status.models for one in model.replicas}
        assert set(states.values()) == {"ready"}, states
        ours = _streaming(urlsplit(status.url).port or 0, load, options.streams)
        rounds: dict[str, tuple[Turn, Rounds]] = {
            "servekit": (ours, {count: [] for count in counts})
        }
        if options.offline:
            assert model is not None
            begun = [
                Offline(make_arguments(model, SHARE), Path(folder) / f"offline-{gpu}.log", gpu)
                for gpu in range(max(counts))
            ]
            processes = [stack.enter_context(one) for one in begun]
            theirs = _generating(processes, load, options.streams)
            rounds["LLM.generate"] = theirs, {count: [] for count in counts}
        for number in range(-1, options.rounds):  # the first is to warm up
            for count in counts:
                for name, (turn, found) in rounds.items():
                    one = turn(count, number)
                    said = f"{number}: {name}, {count} GPU(s): {one.tokens_per_s:,.0f} tok/s"
                    print(said, file=sys.stderr, flush=True)
                    if number >= 0:
                        found[count].append(one)
    print(markdown(_figures(rounds, options.engine)))
    about = f"{options.streams} streams a replica, {options.prompt} tokens in, {options.output} out"
    print(f"\n{about}, {options.gateways} gateway(s); {conditions()}")
    return 0


def _made(engine: str, folder: Path) -> Path | None:
    if engine == "echo":
        return None
    from tests.gpu.adapters import write_middle

    return write_middle(folder)


def _entry(engine: str, model: Path | None, count: int) -> dict[str, Any]:
    """The model on so many GPUs, of the configuration file."""
    known: dict[str, Any] = {"name": f"on{count}", "engine": engine, "replicas": count}
    if model is None:
        return known | {"path": "m", "options": {"slots": SLOTS, "step_s": 0.02}}
    options: dict[str, Any] = {"slots": SLOTS, "max_batch_tokens": STEP_TOKENS}
    if engine == "vllm":
        options |= {"kv_cache_bytes": KV_BYTES}
    place = {"device": "cuda", "gpus": list(range(count)), "memory": f"{SHARE:.0%}"}
    return known | {"path": str(model), "options": options} | place


def _streaming(port: int, load: Load, streams: int) -> Turn:
    def turn(count: int, number: int) -> Round:
        prompts = load.prompts(streams * count, number, stream=True)
        bodies = [
            [body.replace('"model": "m"', f'"model": "on{count}"') for body in of_one]
            for of_one in load.bodies("completions", prompts, stream=True)
        ]
        return ask(Order(port, PATHS["completions"], bodies, True), CLIENTS * count)

    return turn


def _generating(processes: Sequence[Offline], load: Load, streams: int) -> Turn:
    """Each process answers its own prompts, all of a wave at once; the slowest tells the time."""

    def generate(part: tuple[Offline, Sequence[list[int]]]) -> float:
        process, prompts = part
        waves = [prompts[at : at + streams] for at in range(0, len(prompts), streams)]
        return sum(process.seconds(wave, load.output) for wave in waves)

    def turn(count: int, number: int) -> Round:
        prompts = load.prompts(streams * count, number, stream=False)
        size = streams * load.repeats
        parts = [prompts[at : at + size] for at in range(0, len(prompts), size)]
        with ThreadPoolExecutor(count) as pool:
            took_s = max(pool.map(generate, zip(processes[:count], parts, strict=True)))
        tokens = len(prompts) * load.output
        return Round(tokens / took_s, 0, tokens, (), 0.0)

    return turn


def _figures(rounds: Mapping[str, tuple[Turn, Rounds]], engine: str) -> Iterator[Figure]:
    for name, (_, found) in rounds.items():
        rates = {count: [one.tokens_per_s for one in each] for count, each in found.items()}
        alone = statistics.median(rates[1])
        what = f"one {engine} replica" if name == "servekit" else name
        for count, each in rates.items():
            busy = max(one.own_cores for one in found[count])
            how = f"busiest client {busy:.2f} of a core"
            if count == 1:
                yield Figure(f"{what}, tokens/s", spread(each, 0), how=how)
                continue
            ratio = statistics.median(each) / (alone * count)
            said = f"{ratio:.3f} of {count} times that; {spread(each, 0)}"
            if name == "servekit":
                yield Figure(f"{count} replicas", said, f"≥ {AIM}", ratio >= AIM, how)
            else:
                yield Figure(f"{count} processes", said, how=how)


if __name__ == "__main__":
    sys.exit(main())
