"""How tokens/s grow with GPUs: one replica on each, the same load for each, streamed, by turns.

    python -m tests.bench.replicas [--model PATH] [--streams 128] [--prompt 64] [--output 256]

One instance serves the same model once on 1, 2, 4 … of the machine's GPUs, so many as there are;
each has a share of its GPUs' memory. One of them has work at a time, with so many streams for each
of its replicas. The clients are as many for each replica, too, and say so if they are the limit.

--model   a folder of safetensors; by default a random Llama of 0.35e9 parameters in bfloat16
--gpus N  no more than these; `--engine echo --gpus 2` tries the script itself, without a GPU
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from servekit.system.gpus import find_gpus
from tests.bench.crowd import Order, Round, ask
from tests.bench.figures import conditions
from tests.bench.table import Figure, markdown, spread
from tests.bench.vllm import KV_BYTES, PATHS, SLOTS, STEP_TOKENS, Load, vocabulary
from tests.integration.instance import Instance

AIM = 0.97
CLIENTS = 4  # processes, for each replica
#: The models that share a GPU are one for each number of GPUs.
SHARE = 0.28


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
    options = parser.parse_args(arguments)
    there = options.gpus if options.engine == "echo" else min(options.gpus, len(find_gpus()))
    counts = [count for count in (1, 2, 4, 8) if count <= there]
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        model = options.model or _made(options.engine, Path(folder) / "model")
        load = Load(options.prompt, options.output, options.repeats, vocabulary(model), CLIENTS)
        models = [_entry(options.engine, model, count) for count in counts]
        server = {"gateways": options.gateways}
        with Instance.up(Path(folder), models, server=server) as instance:
            status = instance.until_settled(within_s=400)
            states = {one.name: one.state for model in status.models for one in model.replicas}
            assert set(states.values()) == {"ready"}, states
            rounds = _run(urlsplit(status.url).port or 0, load, counts, options)
    print(markdown(_figures(rounds, options)))
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


def _run(
    port: int, load: Load, counts: Sequence[int], options: argparse.Namespace
) -> dict[int, list[Round]]:
    rounds: dict[int, list[Round]] = {count: [] for count in counts}
    for number in range(-1, options.rounds):  # the first is to warm up
        for count in counts:
            prompts = load.prompts(options.streams * count, number, stream=True)
            bodies = [
                [body.replace('"model": "m"', f'"model": "on{count}"') for body in of_one]
                for of_one in load.bodies("completions", prompts, stream=True)
            ]
            found = ask(Order(port, PATHS["completions"], bodies, True), CLIENTS * count)
            print(f"{number}: {count} GPU(s): {found.tokens_per_s:,.0f} tok/s", file=sys.stderr)
            if number >= 0:
                rounds[count].append(found)
    return rounds


def _figures(rounds: dict[int, list[Round]], options: argparse.Namespace) -> Iterator[Figure]:
    rates = {count: [one.tokens_per_s for one in found] for count, found in rounds.items()}
    alone = statistics.median(rates[1])
    for count, found in rates.items():
        busy = max(one.own_cores for one in rounds[count])
        how = f"busiest client {busy:.2f} of a core"
        ratio = statistics.median(found) / (alone * count)
        if count == 1:
            yield Figure(f"one {options.engine} replica, tokens/s", spread(found, 0), how=how)
        else:
            said = f"{ratio:.3f} of {count} times that; {spread(found, 0)}"
            yield Figure(f"{count} replicas", said, f"≥ {AIM}", ratio >= AIM, how)


if __name__ == "__main__":
    sys.exit(main())
