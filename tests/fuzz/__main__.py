"""Hostile requests to every endpoint, and not one answer, or byte of memory, the worse for it.

    python -m tests.fuzz --requests 100000 --seed 1
    python -m tests.fuzz --url http://127.0.0.1:8000 --requests 2000

Prints Markdown tables; exit code 1, with the shortest offending requests, if any answer was a 5xx,
not in its API's envelope, malformed or missing, or if a process died, grew, or leaked descriptors.
Memory counts after the warm-up, requests of the same kinds that come before the others.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from servekit.config.load import load_config
from tests.fuzz.cases import Maker
from tests.fuzz.processes import Watched
from tests.fuzz.report import failures_text, memory_table, requests_table
from tests.fuzz.run import Fuzz
from tests.integration.instance import Instance, echo
from tests.polling import poll

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
GATEWAYS = 2
TASKS = 16
#: Requests until all is imported, all threads run, and the largest bodies have come at once.
WARM_UP = 20_000
#: What a process may grow by after the warm-up: steadily, as what leaks does, and in all. Of a
#: worker's 37 MiB two of the allocator's are 5 %, and what its last threads begin with is more.
STEADY, GROWTH = 0.01, 0.08
#: glibc keeps what it has once needed for a huge body, up to 64 MiB in each arena. So it gives all
#: back at once, and what grows is what the process itself keeps.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
#: Names that a body's model becomes now and then.
STRANGERS = ("", "no such", "echo:latest", "m" * 3000, "e\u0301", "../echo")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="requests before those")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=TASKS, help="connections at once")
    parser.add_argument("--url", help="a service that runs already; its memory is not looked at")
    parser.add_argument("--model", action="store_true", help="SmolLM2 of configs/demo.yaml, too")
    parser.add_argument("--case", type=int, help="print what this case sends, and end")
    parser.add_argument("--steady", type=float, default=STEADY, help="growth that is allowed")
    parser.add_argument("--growth", type=float, default=GROWTH, help="the same, steady or not")
    return parser.parse_args(argv)


def models(*, with_model: bool) -> list[dict[str, Any]]:
    """Plain, with tools and thoughts, and slow enough to be left in the middle."""
    found = [
        echo("echo", max_context=2048),
        echo("think", max_context=2048)
        | {"tool_parser": "hermes", "reasoning_parser": "think", "timeout_s": 60},
        echo("slow", max_context=2048, step_s=0.005),
    ]
    if with_model:
        options = {"threads": 1, "kv_cache_bytes": 160 * 2**20}
        path = load_config(DEMO).models[0].path
        sampling = {"max_tokens": 8}
        one = {"name": "smollm2", "path": path, "device": "cpu", "max_context": 512}
        found.append(one | {"options": options, "sampling": sampling})
    return found


def asked_for(wish: argparse.Namespace) -> list[str]:
    """Of these models, by name; of the slow one only by those who leave in the middle."""
    return ["echo", "think", *(["smollm2"] if wish.model else [])]


def fuzz(url: str, wish: argparse.Namespace, names: Sequence[str], *, legacy: bool) -> Fuzz:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    assert host and port, f"{url} names no host and port"
    return Fuzz(host, port, maker(wish, names, legacy=legacy), wish.warm_up + wish.requests)


def maker(wish: argparse.Namespace, names: Sequence[str], *, legacy: bool = True) -> Maker:
    """With a model proper, most of what is sent goes there."""
    if wish.model:
        return Maker(wish.seed, [*names, *["smollm2"] * 20, *STRANGERS], legacy, share=0.8)
    return Maker(wish.seed, [*names, *names, *STRANGERS], legacy)


def elsewhere(wish: argparse.Namespace) -> list[str]:
    """Against a service that runs already."""
    names = [model["id"] for model in httpx.get(f"{wish.url}/v1/models").json()["data"]]
    legacy = httpx.post(f"{wish.url}/inference", json={"prompt": "a"}).status_code == 200
    one = fuzz(wish.url, wish, names, legacy=legacy)
    return attack(one, wish, None)


def here(wish: argparse.Namespace) -> list[str]:
    """Against an instance of its own; what was wrong."""
    with tempfile.TemporaryDirectory(prefix="servekit-fuzz-") as folder:
        found = models(with_model=wish.model)
        server = {"gateways": GATEWAYS, "legacy": "huixiangdou"}
        with Instance.up(Path(folder), found, server=server, env=GLIBC) as instance:
            status = instance.until_settled(within_s=300)
            names = asked_for(wish)
            one = fuzz(status.url, wish, names, legacy=True)
            for _ in range(8 * GATEWAYS):  # what the first requests open stays open
                httpx.get(f"{status.url}/v1/models")
            warm = wish.warm_up / (wish.warm_up + wish.requests)
            watched = Watched(instance.pid, status, warm)
            wrong = attack(one, wish, watched)
            return wrong + aftermath(instance, watched, wish)


def attack(one: Fuzz, wish: argparse.Namespace, watched: Watched | None) -> list[str]:
    began_s = time.monotonic()
    sample = watched.sample if watched else lambda progress: None
    asyncio.run(one.run(wish.tasks, sample))
    took_s = time.monotonic() - began_s
    total = sum(row.requests for row in one.rows.values())
    print(requests_table(one.rows))
    print(f"\n{total} requests in {took_s:.0f} s, seed {wish.seed}\n")
    return [failures_text(one.failures)] if one.failures else []


def aftermath(instance: Instance, watched: Watched, wish: argparse.Namespace) -> list[str]:
    """What is left behind: descriptors, memory, calls, words in the log."""
    wrong: list[str] = []
    url = instance.url
    try:
        poll("nothing runs or waits", lambda: idle(url), 20)
        poll("no descriptor is left", watched.settled, 20)
    except AssertionError as error:
        wrong.append(str(error))
    print(memory_table(watched.usages))
    wrong += watched.complaints(wish.steady, wish.growth)
    restarts = {r.name: r.restarts for m in instance.status().models for r in m.replicas}
    wrong += [f"{name} was restarted {count} times" for name, count in restarts.items() if count]
    for line in instance.log.splitlines():
        if any(said in line for said in ("Traceback", "unexpected_error", "worker_lost")):
            wrong.append(f"log: {line}")
    return wrong[:40]


def idle(url: str) -> bool:
    """Whether no model has anything to do, by whichever gateways answer."""
    for _ in range(4 * GATEWAYS):
        health = httpx.get(f"{url}/readyz").json()["models"].values()
        if any(model["running"] or model["waiting"] for model in health):
            return False
    return True


def main(argv: Sequence[str]) -> int:
    wish = parse(argv)
    if wish.case is not None:
        print(maker(wish, asked_for(wish)).case(wish.case))
        return 0
    wrong = elsewhere(wish) if wish.url else here(wish)
    if wrong:
        print(f"\nwrong, with seed {wish.seed}:\n" + "\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
