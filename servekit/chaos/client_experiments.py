"""Experiments with clients: slow readers, floods, and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from dataclasses import replace

from servekit.bench.percentiles import Sample
from servekit.chaos.baseline_answers import Tally, make_prompt
from servekit.chaos.client import NO_KEY, ChatAnswer, ChatExchange, Client, Question
from servekit.chaos.load import Load
from servekit.chaos.result import ExperimentContext, ExperimentResult, Judge

_SLOW_CLIENTS = 4
#: Tolerance for the jitter of a busy machine.
_JITTER_S = 0.5
#: Maximum concurrent clients; more would test the machine instead.
_MOST = 1000
#: Tokens of answers that must not end during an experiment.
_LONG = 2000
_CLOSED = (ConnectionError, OSError)


async def slow_client(scene: ExperimentContext) -> ExperimentResult:
    """Run clients that read a byte per second: only their own requests may wait."""
    judge = Judge("slow client", f"{_SLOW_CLIENTS} clients that read a byte a second")
    async with scene.load() as before:
        await asyncio.sleep(scene.seconds)
    long = await _long_question(scene)
    slow = [
        asyncio.create_task(_read_slowly(scene.target.client.connect_slowly(long)))
        for _ in range(_SLOW_CLIENTS)
    ]
    try:
        async with scene.load() as load:
            await asyncio.sleep(scene.seconds)
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
    alone_s, beside_s = (
        Sample(loaded.tally.took_s).percentile_value(99) for loaded in (before, load)
    )
    judge.clean(load.tally)
    judge.expect_within("p99 of the others", beside_s, 2 * alone_s + _JITTER_S)
    judge.notes.append(f"p99 of the others {alone_s:.2f} s before, {beside_s:.2f} s beside them")
    return judge.finding(load.tally)


async def _read_slowly(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with sock, contextlib.suppress(*_CLOSED):
        while True:
            await asyncio.sleep(1)
            if not await loop.sock_recv(sock, 1):
                return


async def flood(scene: ExperimentContext) -> ExperimentResult:
    """Run ten times the clients that fit: each gets 200 or 429, and a light client its turn."""
    if scene.target.client.key != NO_KEY:
        return Judge("flood", "").skip("it needs clients with keys of their own: run it without")
    model = await scene.target.model()
    slots = sum((model.info.slots if model.info else 1) for _ in model.replicas)
    count = _within_limits(10 * (slots + model.max_queue))
    judge = Judge(
        "flood", f"{count} clients at once for {slots} slots and {model.max_queue} queue places"
    )
    known = scene.known[0]
    light = scene.target.client.with_key("light")
    alone = await light.await_answer(known.question, stream=True)
    heavy, until = _Flood(scene.target.client.with_key("heavy")), time.monotonic() + scene.seconds
    crowd = [asyncio.create_task(heavy.ask_until(known.question, until)) for _ in range(count)]
    tally = Tally()
    await asyncio.sleep(min(1.0, scene.seconds / 4))
    while not tally.sent or time.monotonic() < until:  # connecting the crowd may take all the time
        answer = await light.await_answer(known.question, stream=True)
        tally.add(known, answer)
        await asyncio.sleep(0.2 if answer.failure else 0.0)
    await asyncio.gather(*crowd)
    limit_s = 3 * alone.took_s + 2 * _JITTER_S
    judge.promise(not heavy.others, f"neither 200 nor 429: {', '.join(sorted(heavy.others)[:3])}")
    judge.promise(heavy.answered > 0, "no request of the crowd was answered")
    judge.promise(not heavy.unsaid, f"{heavy.unsaid} × 429 without Retry-After")
    judge.clean(tally)
    judge.expect_within(
        "p99 of the light client", Sample(tally.took_s).percentile_value(99), limit_s
    )
    judge.notes.append(f"of the crowd {heavy.answered} × 200, {heavy.refused} × 429")
    judge.notes.append(f"light client: {alone.took_s:.2f} s alone")
    return judge.finding(tally)


class _Flood:
    """Clients that repeat their requests, refused or not."""

    def __init__(self, client: Client) -> None:
        self.answered = self.refused = self.unsaid = 0
        self.others: set[str] = set()
        self._client = client

    async def ask_until(self, question: Question, until: float) -> None:
        while time.monotonic() < until:
            answer = await self._client.await_answer(question, stream=False)
            self._count(answer)
            if answer.status != 200:
                await asyncio.sleep(0.5)  # sooner than Retry-After says

    def _count(self, answer: ChatAnswer) -> None:
        if answer.status == 429:
            self.refused += 1
            self.unsaid += answer.retry_after_s is None or answer.retry_after_s <= 0
        elif answer.failure:
            self.others.add(answer.failure)
        else:
            self.answered += 1


async def disconnect_clients(scene: ExperimentContext) -> ExperimentResult:
    """Fill every slot with clients that disconnect mid-stream: the next clients get the slots at
    once.

    Gateways share the slots, and the kernel distributes connections among gateways arbitrarily, so
    the number of clients is that of the slots of one gateway.
    """
    status, model = await scene.target.read_status(), await scene.target.model()
    slots = sum((model.info.slots if model.info else 1) for _ in model.replicas)
    count = _within_limits(slots // len(status.gateways))
    judge = Judge("vanishing", f"{count} clients on {slots} slots vanish mid-stream")
    long = await _long_question(scene)
    exchanges = [await scene.target.client.send_request(long, stream=True) for _ in range(count)]
    filled = await _count_started(exchanges, within_s=10.0)
    judge.promise(filled == count, f"only {filled} streams started")
    for exchange in exchanges:
        exchange.abort()
    at = time.monotonic()
    load = Load(scene.target.client, scene.known, streams=count)
    async with load:
        began = await _first_chunks(load, count)
        free_s = None if began is None else began - at
    judge.clean(load.tally)
    judge.expect_within(
        f"all {count} slots taken by the next", free_s, 1.0 + 4 * _first_s(scene) + _JITTER_S
    )
    gone = await _engine_idle(scene)
    judge.promise(gone, "requests of disconnected clients still run")
    judge.notes.append(f"{filled} streams ran; the next {count} did after {free_s or 0:.2f} s")
    return judge.finding(load.tally)


async def _first_chunks(load: Load, count: int) -> float | None:
    """Return when the first `count` streams had a chunk each; None after a timeout."""
    deadline = time.monotonic() + 10
    started: set[ChatExchange] = set()
    while time.monotonic() < deadline:
        started |= {exchange for exchange in load.active if exchange.answer.chunks}
        if len(started) >= count:
            return time.monotonic()
        await asyncio.sleep(0.005)
    return None


async def _count_started(exchanges: list[ChatExchange], within_s: float) -> int:
    """Wait until all streams have begun, or a timeout; return the number that have."""
    deadline, started = time.monotonic() + within_s, 0
    while time.monotonic() < deadline and started < len(exchanges):
        await asyncio.sleep(0.01)
        started = sum(exchange.answer.chunks > 0 for exchange in exchanges)
    return started


async def _engine_idle(scene: ExperimentContext) -> bool:
    idle_s = await scene.target.await_status(
        lambda status: (
            not any(
                replica.running or replica.waiting
                for model in status.models
                if model.name == scene.target.name
                for replica in model.replicas
            )
        ),
        within_s=10.0,
    )
    return idle_s is not None


def _first_s(scene: ExperimentContext) -> float:
    """Return the baseline time to the first chunk."""
    firsts = [(k.answer.first_s or k.answer.ended_s) - k.answer.began_s for k in scene.known]
    return Sample(firsts).percentile_value(50)


async def _long_question(scene: ExperimentContext) -> Question:
    """Return a question whose answer lasts for the experiment, if the context allows."""
    model = await scene.target.model()
    context = model.info.max_context if model.info else _LONG
    short = scene.known[0].question
    room = max(short.max_tokens, context - 2 * len(short.text))
    return replace(short, text=make_prompt(10_001), max_tokens=min(_LONG, room))


def _within_limits(count: int) -> int:
    """Limit a number of connections to those that this process, and a gateway, may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(count, _MOST, files - 100))


EXPERIMENTS = {"slow-client": slow_client, "flood": flood, "vanishing": disconnect_clients}
