"""A request that does nothing, through gateway, queue and worker, against a bare application.

The same completion each time, and chats with 64 bodies, 7 sets of headers and two keys by turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec

from tests.bench.contest import Outcome, Plan, bare, contest, ratios, remarks
from tests.bench.load import Order, Result
from tests.bench.table import Figure, spread
from tests.bench.versions import KEYS, vary_requests
from tests.integration.instance import Instance, bearer, echo

PATH = "/v1/completions"
BODY = json.dumps({"model": "echo", "prompt": "hello", "max_tokens": 5})
AIM = 0.75


def figures(folder: Path, plan: Plan) -> Iterator[Figure]:
    """One gateway, one echo worker with its default 64 slots; 64 connections first."""
    yield from _compare(folder / "same", plan, "no-op request", PATH, (BODY,), ("",))
    bodies, headers = vary_requests()
    chats = "/v1/chat/completions"
    yield from _compare(folder / "varied", plan, "varied chats with keys", chats, bodies, headers)


def _compare(
    folder: Path,
    plan: Plan,
    title: str,
    path: str,
    bodies: tuple[str, ...],
    headers: tuple[str, ...],
) -> Iterator[Figure]:
    folder.mkdir()
    keyed = any(headers)
    keys = [{"name": name.lower()[-3:], "environment": name} for name in KEYS]
    sections = {"keys": keys} if keyed else {}
    model = json.loads(bodies[0])["model"]
    with Instance.up(folder, [echo(model)], sections=sections, env=KEYS) as instance:
        status = instance.until_settled()
        port = urlsplit(status.url).port or 0
        key = bearer(KEYS["KEY_ONE"]) if keyed else {}
        answer = httpx.post(status.url + path, content=bodies[0], headers=key)
        answer.raise_for_status()
        ours = (status.gateways[0].pid, status.models[0].replicas[0].pid)
        with bare(answer.text) as (bare_port, bare_pid):
            for connections in (64,) if plan.quick else (64, 1, 16, 256):
                asked = Order(port, path, "", connections, ours, bodies=bodies, headers=headers)
                others = msgspec.structs.replace(
                    asked, port=bare_port, path="/whole", watch=(bare_pid,)
                )
                orders = {"ours": asked, "bare": others}
                yield from _rows(title, connections, contest(orders, plan))


def _rows(title: str, connections: int, outcomes: dict[str, Outcome]) -> Iterator[Figure]:
    ours, theirs = outcomes["ours"], outcomes["bare"]
    rates = ratios(ours, theirs, lambda result: result.answers_per_s)
    ratio = ours.median(_rate) / theirs.median(_rate)
    aimed = connections == 64
    yield Figure(
        f"{title}, {connections} connections, requests/s against bare uvicorn",
        f"{ratio:.2f}; by round {spread(rates)}",
        f"≥ {AIM}" if aimed else "",
        ratio >= AIM if aimed else None,
        f"{ours.median(_rate):,.0f}/s against {theirs.median(_rate):,.0f}/s; {remarks(outcomes)}",
    )
    gateway, worker, alone = ours.each(_us(0)), ours.each(_us(1)), theirs.each(_us(0))
    yield Figure(
        f"… CPU time of a request, {connections} connections",
        f"gateway {spread(gateway, 1)} µs, worker {spread(worker, 1)} µs, "
        f"bare {spread(alone, 1)} µs",
        how=f"schedstat; bare / gateway = {theirs.median(_us(0)) / ours.median(_us(0)):.2f}; "
        f"{ours.median(_writes):.1f} writes a request, bare {theirs.median(_writes):.1f}",
    )


def _rate(result: Result) -> float:
    return result.answers_per_s


def _writes(result: Result) -> float:
    return result.writes / result.answers


def _us(at: int) -> Callable[[Result], float]:
    """CPU time per answer of the watched process `at`, µs."""
    return lambda result: result.cpu_s[at] / result.answers * 1e6
