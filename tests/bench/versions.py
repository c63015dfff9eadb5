"""This version beside another one that is installed elsewhere, under the same load, by turns.

    git worktree add ../before COMMIT && python -m venv ../before/.venv && …
    python -m tests.bench.versions ../before/.venv/bin/python [--rounds 7] [--only requests]

Prints a Markdown table of medians and of this version's figure over the other's, round by round:
requests that do nothing at 1, 16, 64 and 256 connections, the same one and varied ones (64 bodies
of chats, 7 sets of headers, two API keys); the gateway's CPU time for a streamed token, API by API;
the time from `up` to the first answer; the memory after all that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from servekit.system import procfs
from tests.bench.contest import Outcome, Plan, contest
from tests.bench.cpu import memory_bytes
from tests.bench.load import Order, Result
from tests.bench.stream_cost import REQUESTS, STEP_S
from tests.integration.instance import Instance, bearer, echo

PARTS = ("requests", "streams", "start")
KEYS = {"KEY_ONE": "the-first-of-the-keys", "KEY_TWO": "the-second-of-the-keys"}
STREAMS = 64
CONNECTIONS = (64, 1, 16, 256)
HEAD = ("", "before", "now", "now / before", "by round")


@dataclass(frozen=True, slots=True)
class Version:
    """A running instance of one version: only its command line and its answers are used."""

    port: int
    gateway: int  # PID
    workers: tuple[int, ...]
    supervisor: int


@contextlib.contextmanager
def run_version(python: str, folder: Path, models: Sequence[dict[str, Any]]) -> Iterator[Version]:
    """Start `servekit up` of an interpreter's servekit, with two API keys."""
    folder.mkdir()
    keys = [{"name": name.lower()[-3:], "environment": name} for name in KEYS]
    program = (python, "-m", "servekit")
    with Instance.begun(
        folder, models, sections={"keys": keys}, env=KEYS, program=program, cwd=folder
    ) as instance:
        port = instance.until("it has a port", lambda: _find_port(instance), 60)
        instance.until("it is ready", lambda: _is_ready(port), 60)
        children = procfs.find_descendants(instance.pid)
        named = {one.pid: procfs.command_line(one.pid) for one in children}
        gateways = [pid for pid, line in named.items() if "servekit.gateway" in line]
        workers = [pid for pid, line in named.items() if "servekit.worker" in line]
        yield Version(port, gateways[0], tuple(workers), instance.pid)


def _find_port(instance: Instance) -> int:
    record = instance.run_dir / "supervisor.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(json.loads(record.read_text())["url"].rpartition(":")[2])
    return 0


def _is_ready(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    return False


# ---------------------------------------------------------------- requests


def vary_requests() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return bodies of chats and sets of headers, as different clients send them."""
    drawn = random.Random(7)
    bodies = []
    for number in range(64):
        words = " ".join(f"word{drawn.randrange(10_000)}" for _ in range(drawn.randrange(4, 40)))
        body: dict[str, Any] = {"model": "plain", "max_tokens": 5}
        body["messages"] = [
            {"role": "system", "content": f"You are helper {number}."},
            {"role": "user", "content": words},
        ]
        if number % 2:
            body |= {"temperature": round(drawn.random(), 3), "user": f"user-{number}"}
        if number % 3 == 0:
            body |= {"top_p": 0.9, "stop": ["###"], "seed": number}
        bodies.append(json.dumps(body))
    headers = []
    for number in range(7):
        key = tuple(KEYS.values())[number % 2]
        lines = [f"authorization: Bearer {key}", f"x-request-id: request-{number}"]
        lines += [f"user-agent: client/{number}.0", "accept: */*", "accept-encoding: gzip"][:number]
        headers.append("".join(f"{line}\r\n" for line in lines))
    return tuple(bodies), tuple(headers)


def compare_requests(versions: Mapping[str, Version], plan: Plan) -> Iterator[str]:
    bodies, headers = vary_requests()
    for kind, asked, sent in (("same", bodies[:1], headers[:1]), ("varied", bodies, headers)):
        for connections in CONNECTIONS:
            orders = {
                name: Order(
                    one.port,
                    "/v1/chat/completions",
                    "",
                    connections,
                    (one.gateway, *one.workers),
                    bodies=asked,
                    headers=sent,
                )
                for name, one in versions.items()
            }
            outcomes = contest(orders, plan)
            what = f"{connections} connections, {kind}"
            yield row(f"requests/s, {what}", outcomes, lambda one: one.answers_per_s, "{:,.0f}")
            yield row(f"µs of CPU a request, {what}", outcomes, _us_per_request)


def _us_per_request(result: Result) -> float:
    return 1e6 * sum(result.cpu_s) / result.answers


# ---------------------------------------------------------------- streams


def compare_streams(versions: Mapping[str, Version], plan: Plan) -> Iterator[str]:
    _, headers = vary_requests()
    for title, (model, path, body) in REQUESTS.items():
        text = json.dumps({"model": model, **body})
        orders = {
            name: Order(
                one.port, path, text, STREAMS, (one.gateway,), stream=True, headers=headers[:1]
            )
            for name, one in versions.items()
        }
        yield row(f"µs of the gateway a token, {title}", contest(orders, plan), _us_per_token)


def _us_per_token(result: Result) -> float:
    return 1e6 * result.cpu_s[0] / result.tokens


# ---------------------------------------------------------------- start and memory


def compare_starts(pythons: Mapping[str, str], folder: Path, rounds: int) -> Iterator[str]:
    took: dict[str, list[float]] = {name: [] for name in pythons}
    for number in range(rounds):
        for name, python in pythons.items():
            began_s = time.monotonic()
            with run_version(python, folder / f"start-{name}-{number}", [echo("plain")]) as one:
                body = {"model": "plain", "prompt": "hello", "max_tokens": 1}
                answer = httpx.post(
                    f"http://127.0.0.1:{one.port}/v1/completions",
                    json=body,
                    headers=bearer(KEYS["KEY_ONE"]),
                )
                answer.raise_for_status()
                took[name].append(time.monotonic() - began_s)
    yield line("s from `up` to the first answer", took, "{:.2f}")


def compare_memory(versions: Mapping[str, Version]) -> Iterator[str]:
    for part in ("supervisor", "gateway"):
        found = {
            name: [memory_bytes(getattr(one, part))[1] / 1e6] for name, one in versions.items()
        }
        yield line(f"MB (PSS) of the {part}, after all that", found, "{:.0f}")


# ---------------------------------------------------------------- the table


def row(
    what: str,
    outcomes: Mapping[str, Outcome],
    value: Callable[[Result], float],
    form: str = "{:.2f}",
) -> str:
    return line(what, {name: one.each(value) for name, one in outcomes.items()}, form)


def line(what: str, found: Mapping[str, Sequence[float]], form: str) -> str:
    before, now = found["before"], found["now"]
    rounds = [b / a for a, b in zip(before, now, strict=True)]
    medians = [statistics.median(values) for values in (before, now)]
    spread = f"{min(rounds):.2f} to {max(rounds):.2f}"
    ratio = f"{statistics.median(rounds):.2f}"
    return f"| {' | '.join((what, *map(form.format, medians), ratio, spread))} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.versions", description=__doc__)
    parser.add_argument("python", help="the other version's interpreter")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    given = parser.parse_args()
    plan = Plan(rounds=given.rounds, seconds=given.seconds)
    pythons = {"before": str(Path(given.python).absolute()), "now": sys.executable}
    options: dict[str, Any] = {"slots": 2 * STREAMS, "max_context": 100_000, "step_s": STEP_S}
    rich = {"tool_parser": "hermes", "reasoning_parser": "think"}
    models = [echo("plain", **options), echo("rich", **options) | rich]
    quick = [echo("plain")]
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "requests" in given.only:
            show(pythons, folder, quick, lambda found: compare_requests(found, plan))
        if "streams" in given.only:
            show(pythons, folder, models, lambda found: compare_streams(found, plan))
        if "start" in given.only:
            for text in compare_starts(pythons, folder, given.rounds):
                print(text, flush=True)
    return 0


def show(
    pythons: Mapping[str, str],
    folder: Path,
    models: Sequence[dict[str, Any]],
    compare: Callable[[Mapping[str, Version]], Iterator[str]],
) -> None:
    """Print what one comparison of the running versions gives, and their memory after it."""
    part = Path(tempfile.mkdtemp(dir=folder))
    with contextlib.ExitStack() as running:
        versions = {
            name: running.enter_context(run_version(python, part / name, models))
            for name, python in pythons.items()
        }
        for text in (*compare(versions), *compare_memory(versions)):
            print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
