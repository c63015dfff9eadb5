"""Streams through one gateway, worker hop included, against an application that makes up its own.

Four conditions, for the rate alone would not say what was compared:

    in step   the worker's next step is there as soon as the gateway has read the one before: as
              fast as it can while each token has a write of its own. Takes a core for the worker,
              another for the clients (`tests.bench.stepwise`)
    paced     a token for each stream every 5 ms; what is compared is CPU time, as the rate is
              given, and a client that waits has to be woken for each write
    flat out  the worker's steps as fast as they go, one token for each stream; those that have
              come by the time a stream is written share the event and the write
    bursts    16 tokens a step, as an engine that runs ahead would bring them
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from servekit.protocol.messages import Status
from tests.bench import stepwise
from tests.bench.contest import Outcome, Plan, bare, contest, remarks
from tests.bench.load import MARK, Order, Result
from tests.bench.table import Figure, spread
from tests.integration.instance import Instance, echo

STREAMS = 128
TOKENS = 2000
BURST = 16
STEPS_S = {"paced": 0.005, "flat-out": 0.000001, "bursts": 0.0}
#: Tokens a write up to which each has one of its own.
ALONE = 1.1


def figures(folder: Path, plan: Plan) -> Iterator[Figure]:
    models = [
        echo(name, replicas=1, slots=512, max_context=100_000, step_s=step_s)
        for name, step_s in STEPS_S.items()
    ]
    with Instance.up(folder, models) as instance, bare("{}") as (bare_port, bare_pid):
        status = instance.until_settled()
        for streams in (STREAMS, 1, 32, 512) if plan.wide else (STREAMS,):
            orders = ours(status, streams) | {
                path: Order(bare_port, f"/{path}", body(""), streams, (bare_pid,), True)
                for path in ("turns", "stream")
            }
            some = plan if streams == STREAMS else plan.fewer(3)
            yield from _rows(streams, contest(orders, some))
    (own := folder / "in-step").mkdir()
    yield from _in_step(own, plan)


def _in_step(folder: Path, plan: Plan) -> Iterator[Figure]:
    env = stepwise.installed(folder / "site")
    with Instance.up(folder, [stepwise.model("m")], env=env) as instance, bare("{}") as (port, pid):
        status = instance.until_settled()
        for streams in (STREAMS, 32, 512) if plan.wide else (STREAMS,):
            orders = ours(status, streams)
            orders["turns"] = Order(port, "/turns", body(""), streams, (pid,), True)
            yield _a_write_each(streams, contest(orders, plan))


def _a_write_each(streams: int, outcomes: dict[str, Outcome]) -> Figure:
    best, turns = outcomes["m"], outcomes["turns"]
    ratio = best.median(_rate) / turns.median(_rate)
    busy = best.median(lambda result: result.cpu_s[0] / result.wall_s)
    return Figure(
        f"streamed tokens/s, {streams} streams, a write for each",
        f"{ratio:.2f}; {best.median(_rate):,.0f}/s against {turns.median(_rate):,.0f}/s",
        "≥ 1.2",
        ratio >= 1.2 and _tokens_a_write(best) <= ALONE,
        f"{_share(best)}; CPU time {spread(best.each(_us), 1)} µs a token against "
        f"{spread(turns.each(_us), 1)} µs; the gateway took {busy:.2f} of a core; "
        f"{remarks(outcomes)}",
    )


def ours(status: Status, streams: int) -> dict[str, Order]:
    port = urlsplit(status.url).port or 0
    gateway = status.gateways[0].pid
    return {
        model.name: Order(
            port,
            "/v1/completions",
            body(model.name),
            streams,
            (gateway, model.replicas[0].pid),
            True,
        )
        for model in status.models
    }


def body(model: str) -> str:
    ask = {"model": model, "prompt": MARK * 64, "max_tokens": TOKENS, "stream": True}
    return json.dumps(ask)


def _rows(streams: int, outcomes: dict[str, Outcome]) -> Iterator[Figure]:
    aimed = streams == STREAMS
    turns, stream = outcomes["turns"], outcomes["stream"]
    conditions = remarks(outcomes)

    paced = outcomes["paced"]
    ratio = paced.median(_per_cpu_s) / turns.median(_per_cpu_s)
    yield Figure(
        f"streamed tokens per CPU second, {streams} streams that are paced",
        f"{ratio:.2f}; {spread(paced.each(_us), 1)} µs against {spread(turns.each(_us), 1)} µs",
        how=f"{paced.median(_rate):,.0f}/s, {_share(paced)}; bare writes each in a turn of its "
        f"own, {_share(turns)}; {conditions}",
    )
    free = outcomes["flat-out"]
    ratio = free.median(_rate) / turns.median(_rate)
    yield Figure(
        f"streamed tokens/s, {streams} streams, tokens may share a write",
        f"{ratio:.2f}; {free.median(_rate):,.0f}/s against {turns.median(_rate):,.0f}/s",
        "≥ 5" if aimed else "",
        ratio >= 5 if aimed else None,
        f"{_share(free)}; CPU time {spread(free.each(_us), 1)} µs a token "
        f"({turns.median(_us) / free.median(_us):.2f} of the bare one's work a second); "
        f"{free.median(_rate) / stream.median(_rate):.2f} of a bare one that never lets the loop "
        f"turn ({stream.median(_rate):,.0f}/s, {_share(stream)})",
    )
    bursts = outcomes["bursts"]
    yield Figure(
        f"streamed tokens/s, {streams} streams, {BURST} tokens a step",
        f"{bursts.median(_rate) / turns.median(_rate):.1f}; {bursts.median(_rate):,.0f}/s",
        how=f"CPU time {spread(bursts.each(_us), 1)} µs a token, {_share(bursts)}",
    )


def _rate(result: Result) -> float:
    return result.tokens_per_s


def _per_cpu_s(result: Result) -> float:
    return result.tokens / result.cpu_s[0]


def _us(result: Result) -> float:
    return result.cpu_s[0] / max(1, result.tokens) * 1e6  # none if the load generator stalls


def _tokens_a_write(outcome: Outcome) -> float:
    return outcome.median(lambda result: result.tokens / max(1, result.writes))


def _share(outcome: Outcome) -> str:
    return f"{_tokens_a_write(outcome):.1f} tokens a write"
