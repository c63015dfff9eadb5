"""A request that does nothing, through gateway, queue and worker, against a bare application."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.bench.contest import Outcome, Plan, bare, contest, ratios, remarks
from tests.bench.load import Order, Result
from tests.bench.table import Figure, spread
from tests.integration.instance import Instance, echo

PATH = "/v1/completions"
BODY = json.dumps({"model": "echo", "prompt": "hello", "max_tokens": 5})
AIM = 0.75


def figures(folder: Path, plan: Plan) -> Iterator[Figure]:
    """One gateway, one echo worker with its default 64 slots; 64 connections first."""
    with Instance.up(folder, [echo("echo")]) as instance:
        status = instance.until_settled()
        port = urlsplit(status.url).port or 0
        answer = httpx.post(status.url + PATH, content=BODY)
        answer.raise_for_status()
        ours = (status.gateways[0].pid, status.models[0].replicas[0].pid)
        with bare(answer.text) as (bare_port, bare_pid):
            for connections in (64,) if plan.quick else (64, 1, 16, 256):
                orders = {
                    "ours": Order(port, PATH, BODY, connections, ours),
                    "bare": Order(bare_port, "/whole", BODY, connections, (bare_pid,)),
                }
                yield from _rows(connections, contest(orders, plan))


def _rows(connections: int, outcomes: dict[str, Outcome]) -> Iterator[Figure]:
    ours, theirs = outcomes["ours"], outcomes["bare"]
    rates = ratios(ours, theirs, lambda result: result.answers_per_s)
    ratio = ours.median(_rate) / theirs.median(_rate)
    aimed = connections == 64
    yield Figure(
        f"no-op request, {connections} connections, requests/s against bare uvicorn",
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
