"""How long a death is noticed for, by the gateway and by those whose worker it was.

One of several workers is killed while each runs a stream, and again while each runs a request
that is not streamed. What the client loses is taken over all of them, so it is the worst of both
the ones whose worker died and the ones that must now share theirs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import httpx

from servekit.protocol.messages import ReplicaStatus
from tests.bench.contest import Plan
from tests.bench.cpu import await_calm
from tests.bench.table import Figure, percentile
from tests.integration.instance import Instance, echo

WORKERS = 4
STEP_S = 0.01
PROMPT = "abcdefghij"
TOKENS = 60
KILL_AFTER_S = 0.2
KILLS = 24
#: Longest that anything here may take.
LIMIT_S = 30.0
_LOST = re.compile(r"(\S+Z).*worker_lost")


@dataclass(slots=True)
class Losses:
    """Seconds, one for each kill."""

    noticed_s: list[float] = field(default_factory=list)  # by the gateway's own log
    breaks_s: list[float] = field(default_factory=list)  # in a stream, beyond its step
    added_s: list[float] = field(default_factory=list)  # to an answer that is not streamed
    answers_wrong: int = 0


def figures(folder: Path, plan: Plan) -> Iterator[Figure]:
    losses = Losses()
    kills = 2 if plan.quick else KILLS
    with Instance.up(folder, [echo("echo", replicas=WORKERS, step_s=STEP_S)]) as instance:
        instance.until_settled()
        with httpx.Client(base_url=instance.url, timeout=LIMIT_S) as client:
            own_s = min(_whole_s(client) for _ in range(2 if plan.quick else 5))
        for at in range(kills):
            await_calm(plan.calm_within_s)
            _kill(instance, at, own_s, losses)
    assert not losses.answers_wrong, f"{losses.answers_wrong} answers were not the whole text"
    yield from _rows(losses, own_s)


def _rows(losses: Losses, own_s: float) -> Iterator[Figure]:
    noticed, breaks, added = losses.noticed_s, losses.breaks_s, losses.added_s
    count = f"{len(breaks) + len(added)} kills, {WORKERS} workers"
    yield Figure(
        "death noticed by the gateway",
        _percentiles(noticed),
        "< 10 ms",
        percentile(noticed, 0.5) < 0.010,
        f"{count}; SIGKILL to the gateway's log line; met by the median",
    )
    yield Figure(
        "… the longest break in any stream, beyond the normal step",
        _percentiles(breaks),
        how=f"{len(breaks)} kills, {WORKERS} streams with a token every {STEP_S * 1000:g} ms",
    )
    yield Figure(
        "… a request that is not streamed, answered by a warm peer",
        _percentiles(added),
        "< 100 ms added",
        percentile(added, 0.5) < 0.1,
        f"{len(added)} kills; own time {own_s:.2f} s; slowest of {WORKERS} at once; met by median",
    )


def _percentiles(values_s: Sequence[float]) -> str:
    p50, p99 = (percentile(values_s, fraction) * 1000 for fraction in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"


def _body(stream: bool) -> bytes:
    ask = {"model": "echo", "prompt": PROMPT, "max_tokens": TOKENS, "stream": stream}
    return json.dumps(ask).encode()


def _whole_s(client: httpx.Client) -> float:
    began = time.perf_counter()
    client.post("/v1/completions", content=_body(False)).raise_for_status()
    return time.perf_counter() - began


# ---------------------------------------------------------------- one kill


def _kill(instance: Instance, at: int, own_s: float, losses: Losses) -> None:
    """Kill a worker under load; streams and whole answers take turns, and so do the workers."""
    victim = _all_ready(instance, at % WORKERS)
    lines, streamed = len(_LOST.findall(instance.log)), at % 2 == 0
    killed_at, answers = asyncio.run(_under_load(instance.url, victim.pid, streamed))
    worst_s = max(seconds for seconds, _ in answers)
    losses.answers_wrong += sum(text != PROMPT * (TOKENS // len(PROMPT)) for _, text in answers)
    if streamed:
        losses.breaks_s.append(worst_s - STEP_S)
    else:
        losses.added_s.append(worst_s - own_s)
    losses.noticed_s.append(_noticed_at(instance, lines) - killed_at)


async def _under_load(url: str, pid: int, streamed: bool) -> tuple[float, list[tuple[float, str]]]:
    """Unix time of the kill; and of each request, what `_break_s` or `_total_s` says."""
    kind = _break_s if streamed else _total_s
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
        running = [asyncio.create_task(kind(client)) for _ in range(WORKERS)]
        await asyncio.sleep(KILL_AFTER_S)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        return killed_at, await asyncio.gather(*running)


def _all_ready(instance: Instance, at: int) -> ReplicaStatus:
    """The replica to kill, once all of them serve and the gateway reaches them."""

    def probe() -> bool:
        if any(replica.state != "ready" for replica in instance.model("echo").replicas):
            return False
        return instance.log.count("worker_connected") >= WORKERS + len(_LOST.findall(instance.log))

    instance.until("all workers serve", probe, within_s=LIMIT_S)
    return instance.model("echo").replicas[at]


def _noticed_at(instance: Instance, lines: int) -> float:
    """Unix time of the newest "worker_lost" line, once there are more than `lines`."""
    instance.until(
        "the gateway says so", lambda: len(_LOST.findall(instance.log)) > lines, within_s=LIMIT_S
    )
    return datetime.fromisoformat(_LOST.findall(instance.log)[-1]).timestamp()


async def _total_s(client: httpx.AsyncClient) -> tuple[float, str]:
    began = time.perf_counter()
    answer = await client.post("/v1/completions", content=_body(False))
    answer.raise_for_status()
    return time.perf_counter() - began, answer.json()["choices"][0]["text"]


async def _break_s(client: httpx.AsyncClient) -> tuple[float, str]:
    """The longest time between two events of a stream, and its text."""
    longest_s, last, text = 0.0, None, ""
    async with client.stream("POST", "/v1/completions", content=_body(True)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            longest_s = max(longest_s, now - (last or now))
            last = now
            text += json.loads(line[6:])["choices"][0]["text"]
    return longest_s, text
