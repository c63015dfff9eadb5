"""Engines that die under load, on two replicas each: nothing fails, and no text differs.

    python -m tests.gpu.engine_deaths [--engines vllm transformers] [--streams 64] [--times 2]
    python -m tests.gpu.engine_deaths --device cpu --engines echo transformers --streams 16

    worker   SIGKILL to the busiest worker, for comparison
    step     an exception in the next step of its engine
    engine   SIGKILL to the process below it that runs its engine: vLLM's engine core

The two replicas share a GPU where there is one, by `--memory` each. The model is a small one that
has learnt texts by heart, in bfloat16: what it says is known, and no near-tie is left to rounding.
`--device cpu` tries the script itself, with a random model in float32.
Prints a Markdown table; exit code 1 if any request failed or any text differs.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servekit.chaos.baseline_answers import BaselineAnswer, learn_answers, make_prompt
from servekit.chaos.client import Question
from servekit.chaos.load import Load, Silences
from servekit.chaos.target import Target
from servekit.protocol.messages import Status
from servekit.system.parent_death import CHAOS
from servekit.units import format_latency
from tests.gpu.reciting import TEXTS, prompts, write_reciter
from tests.integration.instance import Instance, echo
from tests.soak.kills import DEATHS
from tests.unit.engines.harness import write_tiny_llama

UP_S = 600.0
#: How long the load goes on once both replicas serve again.
AFTER_S = 3.0
TOKENS = 200
#: Starts of a replica after which its engine is given up.
STARTS = 3
WAYS = {
    "vllm": ("worker", "step", "engine"),
    "transformers": ("worker", "step"),
    "echo": ("worker", "step"),
}
HEAD = (
    *("engine", "death", "requests", "failed", "texts that differ"),
    *("longest silence of a stream", "both serve again", "exit reason"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.engine_deaths")
    parser.add_argument("--engines", nargs="+", choices=sorted(WAYS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--wholes", type=int, default=8)
    parser.add_argument("--deaths", nargs="+", choices=sorted(DEATHS), help="these alone")
    parser.add_argument("--times", type=int, default=2, help="each death so often")
    parser.add_argument("--memory", default="12GiB", help="of the GPU, for each replica")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the instances are ended, too
    engines = args.engines or (["vllm", "transformers"] if args.device == "cuda" else ["echo"])
    failed = False
    with tempfile.TemporaryDirectory(prefix="servekit-gpu-") as folder:
        model = Path(folder) / "model"
        if set(engines) != {"echo"}:
            write_model(model, args.device)
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
        for engine in engines:
            home = Path(folder) / engine
            home.mkdir()
            for row, ok in rows(home, engine, model, args):
                print(f"| {' | '.join(row)} |", flush=True)
                failed = failed or not ok
    return int(failed)


def write_model(folder: Path, device: str) -> None:
    """One that has learnt its texts; on a CPU, whose float32 repeats, a random one will do."""
    if device == "cpu":
        write_tiny_llama(folder, hidden_size=256)  # heads of 64, as vLLM wants them
        return
    write_reciter(folder, device)
    (folder / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")


def entry(engine: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The model's section of the configuration; any replica has room for all."""
    slots = args.streams + args.wholes
    if engine == "echo":
        return echo("m", replicas=2, step_s=0.01, slots=slots)
    options: dict[str, Any] = {"slots": slots}
    if engine == "vllm":
        options["enforce_eager"] = True
    elif args.device == "cpu":
        options["threads"] = 1
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    found = {"name": "m", "engine": engine, "path": str(model), "device": args.device}
    found |= {"dtype": dtype, "replicas": 2, "max_context": 512, "options": options}
    return found | ({"memory": args.memory} if args.device == "cuda" else {})


def rows(
    home: Path, engine: str, model: Path, args: argparse.Namespace
) -> Iterator[tuple[list[str], bool]]:
    """A row for each death, and whether all went well."""
    with Instance.up(home, [entry(engine, model, args)], env={CHAOS: "1"}) as instance:
        instance.until("both replicas serve", lambda: both_serve(instance), UP_S)
        url, known = instance.url, None
        ways = [way for way in WAYS[engine] if way in (args.deaths or DEATHS)]
        for way in ways * args.times:
            known, row, ok = asyncio.run(die(url, instance.run_dir, engine, way, args, known=known))
            yield row, ok


def both_serve(instance: Instance) -> bool:
    """Whether the start is over. RuntimeError if an engine cannot start, with its reason."""
    replicas = instance.model("m").replicas
    for replica in replicas:
        if replica.restarts >= STARTS and replica.state != "ready":
            raise RuntimeError(f"{replica.reason}\n{instance.log[-3000:]}")
    return all(replica.state == "ready" for replica in replicas)


async def die(
    url: str,
    run_dir: Path,
    engine: str,
    way: str,
    args: argparse.Namespace,
    *,
    known: list[BaselineAnswer] | None,
) -> tuple[list[BaselineAnswer], list[str], bool]:
    """Have the busiest replica die under load; the undisturbed answers, a row, and whether well."""
    target = await Target.find_target(url, run_dir, "m")
    if await target.until_whole(UP_S) is None:
        raise RuntimeError(f"not both replicas of {engine} serve")
    known = known or await undisturbed(target, engine, args.device, args.streams)
    async with Load(target.client, known, args.streams, args.wholes) as load:
        await load.until_busy(60.0)
        victim = max(await target.ready_replicas(), key=lambda replica: replica.running)
        silences, began = Silences(load.active), time.monotonic()
        DEATHS[way](victim.pid)
        gone_s = await target.await_status(lambda status: victim.pid not in _ready(status), 60.0)
        whole_s = await target.until_whole(UP_S, without=victim.pid)
        back_s = None if whole_s is None else time.monotonic() - began
        await asyncio.sleep(AFTER_S)
    replicas = (await target.model()).replicas
    reason = next(replica.reason for replica in replicas if replica.name == victim.name)
    tally = load.tally
    ok = tally.clean and tally.answered > 0 and None not in (gone_s, back_s)
    numbers = [str(tally.sent), str(tally.failed), str(tally.wrong)]
    times = [format_latency(max(silences.silent_s, default=0.0)), format_latency(back_s)]
    broken = f"; broken: {tally.complaints()}" if tally.complaints() else ""
    return known, [engine, way, *numbers, *times, reason + broken], ok


def _ready(status: Status) -> set[int]:
    return {r.pid for model in status.models for r in model.replicas if r.state == "ready"}


async def undisturbed(
    target: Target, engine: str, device: str, streams: int
) -> list[BaselineAnswer]:
    """Questions and their answers, which a model that recites knows beforehand.

    :raises RuntimeError: It answers otherwise even undisturbed.
    """
    recites = engine != "echo" and device == "cuda"
    begun = prompts() if recites else [make_prompt(n, words=8) for n in range(len(TEXTS))]
    found = await learn_answers(
        target.client, [Question("m", b, TOKENS) for b in begun], at_once=streams
    )
    wrong = [
        one.answer.text
        for one, begin, text in zip(found, begun, TEXTS, strict=True)
        if not one.sure or (recites and begin + one.answer.text != text)
    ]
    if wrong:
        raise RuntimeError(f"{engine} does not repeat its texts: {wrong}")
    return found


if __name__ == "__main__":
    sys.exit(main())
