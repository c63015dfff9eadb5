"""What it costs a gateway to count a request, and what an engine step brings to a stream.

    python -m tests.bench.counting

The same calls are played with the meters and with ones that count nothing, by turns, in small
batches, of which the quickest counts: what else runs on the machine only adds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from servekit.gateway.routing.model_queue import ModelQueue
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.step_delivery import feed_step
from servekit.gateway.telemetry.metrics import RequestMeter, RequestMetrics
from servekit.gateway.telemetry.observer import RequestObserver
from servekit.protocol.messages import Delta, ModelStatus, SamplingParams, TokenBatch

BATCH = 100
PARAMS = SamplingParams()
FIRST = Delta(1, "a", [5], prompt_tokens=7)
LAST = Delta(1, "", [], "stop", 7, 1)


class Idle(RequestMeter):
    """Counts nothing."""

    def count_tokens(self, took_s: float, streams: int) -> None:
        pass


IDLE, NOBODY = Idle("", "", ""), (RequestObserver(),)


def leave_alone(call: InflightRequest) -> None:
    call.meter, call.observers = IDLE, NOBODY


def play(observe: Callable[[InflightRequest], None]) -> Callable[[], object]:
    """A whole request, its end included."""

    def request() -> None:
        call = InflightRequest("m", PARAMS, messages=[], stream=False)
        observe(call)
        call.request(1)
        call.feed(FIRST)
        call.feed(LAST)

    return request


def tokens(observe: Callable[[InflightRequest], None]) -> Callable[[], object]:
    """One more token of a stream."""
    call = InflightRequest("m", PARAMS, messages=[])
    observe(call)
    call.feed(FIRST)
    calls, step = {1: call}, TokenBatch([1], ["a"], [5])

    def token() -> None:
        feed_step(calls, step)
        if len(call.emitted) == BATCH:
            call.emitted.clear()
            call.take_text()

    return token


def quickest_s(works: list[Callable[[], object]], batches: int) -> list[float]:
    """Of each, the time of one in its quickest batch."""
    best = [float("inf")] * len(works)
    for _ in range(batches):
        for at, work in enumerate(works):
            began = time.perf_counter()
            for _ in range(BATCH):
                work()
            best[at] = min(best[at], (time.perf_counter() - began) / BATCH)
    return best


async def main(batches: int = 3000) -> None:
    measures = RequestMetrics()
    route = ModelQueue(ModelStatus("m", "echo", "-", 0, ()))

    def counting(call: InflightRequest) -> None:
        measures.observe(route, call)

    for what, make in (("a request", play), ("a step of a stream", tokens)):
        with_it, without = quickest_s([make(counting), make(leave_alone)], batches)
        print(f"{what}: {1e6 * with_it:.2f} µs; {1e6 * without:.2f} µs where nothing is counted")


if __name__ == "__main__":
    asyncio.run(main())
