"""Many streams, workers and engines that die all the time, and not one request the worse for it.

    python -m tests.soak --engine echo --streams 200 --workers 4 --kill-every-s 2 --minutes 2
    python -m tests.soak --engine smollm2 --deaths step

Workers are killed and steps raise, in turns by chance; `--deaths` says which (`engine` needs
engines that have processes of their own).

Prints a Markdown table; exit code 1 if any request failed or any text was not the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servekit.bench.percentiles import Sample
from servekit.chaos.baseline_answers import Tally, learn_answers, make_prompt
from servekit.chaos.client import Question
from servekit.chaos.load import Load
from servekit.chaos.target import Target
from servekit.config.load import load_config
from servekit.system.parent_death import CHAOS
from servekit.units import format_latency
from tests.integration.instance import Instance, echo
from tests.soak.kills import DEATHS, Kill, Killer

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
#: What is asked for where the command line says nothing, by engine.
DEFAULTS: dict[str, dict[str, float]] = {
    "echo": {"streams": 200, "workers": 4, "kill_every_s": 2, "minutes": 2, "tokens": 300},
    # A smaller size: every kill costs a second of a core before the next worker serves.
    "smollm2": {"streams": 4, "workers": 4, "kill_every_s": 2, "minutes": 2, "tokens": 12},
}
STEP_S = 0.02
#: For a model's worker, which is up the sooner the less it asks for: six full contexts of SmolLM2.
KV_CACHE_BYTES = 160 * 2**20
#: Different questions; each is asked many times over.
QUESTIONS = 64


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--engine", choices=sorted(DEFAULTS), default="echo")
    parser.add_argument("--streams", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--kill-every-s", type=float)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--tokens", type=int, help="the longest answer")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--deaths", nargs="+", choices=sorted(DEATHS), default=["worker", "step"])
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    for name, value in DEFAULTS[given.engine].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return given


def model(args: argparse.Namespace) -> dict[str, Any]:
    """The model's section of the configuration."""
    if args.engine == "echo":
        # Slots for all on half of the workers: what the others leave behind finds room at once.
        slots = math.ceil(args.streams * args.gateways / max(1, args.workers // 2))
        return echo("soak", replicas=args.workers, step_s=STEP_S, slots=slots)
    path = load_config(DEMO).models[0].path
    options = {"threads": 1, "slots": 2 * args.streams, "kv_cache_bytes": KV_CACHE_BYTES}
    settings = {"name": "soak", "path": path, "device": "cpu", "replicas": args.workers}
    return {**settings, "max_context": 512, "options": options}


def questions(args: argparse.Namespace) -> list[Question]:
    """Answers of all lengths from echo, all of the same from a model."""
    if args.engine == "echo":
        least = args.tokens // 6
        sizes = [least + (args.tokens - least) * n // (QUESTIONS - 1) for n in range(QUESTIONS)]
        return [Question("soak", make_prompt(n), size) for n, size in enumerate(sizes)]
    return [Question("soak", make_prompt(n, words=8), args.tokens) for n in range(4 * args.streams)]


async def soak(url: str, run_dir: Path, args: argparse.Namespace) -> tuple[Load, Killer, float]:
    """The load, the killer, and the time of this process on the processor per second."""
    target = await Target.find_target(url, run_dir, None)
    known = await learn_answers(target.client, questions(args), at_once=args.streams)
    unsure = sum(not one.sure for one in known)
    if unsure:
        print(f"{unsure} of {len(known)} questions are not answered alike twice", file=sys.stderr)
    began, used = time.monotonic(), _cpu_s()
    async with Load(target.client, known, args.streams) as load_:
        await load_.until_busy(60.0)
        killer = Killer(target, load_, args.kill_every_s, args.seed, args.deaths)
        await killer.run(60 * args.minutes)
    return load_, killer, (_cpu_s() - used) / (time.monotonic() - began)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rows(tally: Tally, killer: Killer, client: float, step_s: float) -> list[tuple[str, ...]]:
    kills = killer.kills
    noticed = [kill.noticed_s for kill in kills if kill.noticed_s is not None]
    rerouted = [gap_s for kill in kills for gap_s in kill.rerouted_s(step_s)]
    back = [kill.back_s for kill in kills if kill.back_s is not None]
    whole = [kill.whole_s for kill in kills if kill.whole_s is not None]
    mean = sum(count for _, count in killer.ready_s) / max(1, len(killer.ready_s))
    return [
        ("requests", str(tally.sent), ""),
        ("… failed", str(tally.failed), ""),
        ("… with another text than undisturbed", str(tally.wrong), ""),
        ("… with chunks repeated", str(tally.kinds["repeated"]), ""),
        ("… with chunks missing", str(tally.kinds["missing"]), ""),
        ("… with usage not counted once and right", str(tally.kinds["usage"]), ""),
        ("workers killed, or their engines", deaths(kills), ""),
        ("streams that were on them", str(sum(kill.in_flight for kill in kills)), ""),
        ("kill to noticed by the gateway (p50, p99)", *_spread(noticed)),
        ("streams on the victim: silence beyond a step (p50, p99)", *_spread(rerouted)),
        ("kill to that worker's successor ready (p50, p99)", *_spread(back)),
        ("kill to all workers ready (p50, p99)", *_spread(whole)),
        ("request, from asking to its end (p50, p99)", *_spread(tally.took_s)),
        ("workers ready, on average", f"{mean:.2f}", ""),
        ("turns when no worker was there to be killed", str(killer.spared), ""),
        ("the client's share of a core", f"{client:.2f}", ""),
    ]


def deaths(kills: Sequence[Kill]) -> str:
    """How many in all, and of each way: "12 (step 5, worker 7)"."""
    ways = sorted(Counter(kill.of for kill in kills).items())
    return f"{len(kills)} ({', '.join(f'{way} {count}' for way, count in ways)})"


def _spread(values: Sequence[float]) -> tuple[str, str]:
    if not values:
        return "-", "-"
    return format_latency(Sample(values).percentile_value(50)), format_latency(
        Sample(values).percentile_value(99)
    )


def table(head: str, lines: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(
        [f"| {head} | | |", "|---|---|---|", *(f"| {' | '.join(line)} |" for line in lines)]
    )


def main() -> int:
    args = parse(sys.argv[1:])
    with (
        tempfile.TemporaryDirectory(prefix="servekit-soak-") as folder,
        Instance.up(
            Path(folder), [model(args)], server={"gateways": args.gateways}, env={CHAOS: "1"}
        ) as instance,
    ):
        instance.until_settled(within_s=600.0)
        done, killer, client = asyncio.run(soak(instance.url, instance.run_dir, args))
    tally = done.tally
    head = (
        f"{args.engine}: {args.streams} streams at a time, {args.workers} workers, "
        f"one death every {args.kill_every_s:g} s for {args.minutes:g} minutes, "
        f"answers of at most {args.tokens} tokens"
    )
    print(table(head, rows(tally, killer, client, STEP_S)))
    if tally.complaints():
        print(f"\nbroken: {tally.complaints()}", file=sys.stderr)
    return 0 if tally.clean and killer.kills else 1


if __name__ == "__main__":
    sys.exit(main())
