"""A cluster in simulated time: streams through the real routing, deaths through the real restarts.

Every gateway has a `Balancer` and knows of each worker what a gateway knows: its own streams there,
and once a second how many there are in all. Every worker has a `RestartPolicy`, all share one
`BreakerPolicy`, and a life's times are the clock's. Clients ask again as soon as they are answered.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from servekit.gateway.routing.balancing.load_balancer import Account, Balancer
from servekit.gateway.routing.request import InflightRequest
from servekit.protocol.messages import (
    ModelInfo,
    ModelStatus,
    ReplicaStatus,
    SamplingParams,
)
from servekit.supervisor.lifecycle.restart_policy import BreakerPolicy, RestartPolicy

REPORT_S = 1.0
_ANSWER = [0] * 128  # tokens


@dataclass(frozen=True)
class Shape:
    """What there is. Times in s."""

    workers: int = 1000
    gateways: int = 16
    streams: int = 100_000
    slots: int = 128
    stream_s: float = 60.0  # of one answer, on average
    load_s: float = 20.0
    kill: float = 0.1  # of the workers, all at once
    bad: int = 0  # workers that are in a crash loop from the beginning
    before_s: float = 20.0
    after_s: float = 60.0


class Stream:
    """One answer under way, or waiting for a worker."""

    __slots__ = ("call", "epoch", "gateway", "left_s", "until", "waits_since", "worker")

    def __init__(self, gateway: Gateway, call: InflightRequest, left_s: float) -> None:
        self.gateway, self.call, self.left_s = gateway, call, left_s
        self.worker: Seen | None = None
        self.until = self.waits_since = 0.0
        self.epoch = 0


class Worker:
    def __init__(self, index: int, chance: Callable[[], float]) -> None:
        self.name = f"m/{index}"
        self.policy = RestartPolicy(chance)
        self.serves = True
        self.bad = False
        self.began: Counter[int] = Counter()  # streams, by the second
        self.back_s: float | None = None


class Seen:
    """A worker's incarnation as one gateway sees it: a `balancer.Target`."""

    def __init__(self, worker: Worker, slots: int, share: int) -> None:
        self.worker, self.slots, self.share = worker, slots, share
        self.name = self.socket = worker.name
        self.info: ModelInfo | None = ModelInfo(8192, slots, True, "m", "bfloat16", "cuda")
        self.account: Account | None = None
        self.last_id = 0
        self.calls: dict[int, InflightRequest] = {}
        self.streams: dict[int, Stream] = {}
        self.routable = True

    @property
    def credits(self) -> int:
        return self.slots // self.share - len(self.calls) if self.routable else 0

    def take(self, stream: Stream) -> None:
        self.last_id += 1
        stream.worker, stream.call.wire_id = self, self.last_id
        self.calls[self.last_id] = stream.call
        self.streams[self.last_id] = stream
        stream.call.emitted.append(0)  # its prompt is read at once

    def drop(self, stream: Stream) -> None:
        id = stream.call.wire_id
        del self.calls[id], self.streams[id]
        stream.call.emitted = _ANSWER
        if self.account is not None:
            self.account.remove_call(id, stream.call)


@dataclass
class Gateway:
    seen: dict[str, Seen] = field(default_factory=dict)
    balancer: Balancer[Seen] = field(default_factory=Balancer)
    waiting: deque[Stream] = field(default_factory=deque)


@dataclass
class Outcome:
    """What came of it. Times in s, since the deaths."""

    choice_s: list[float] = field(default_factory=list)  # each took so long, here
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)  # p99, most; of the mean
    lost: int = 0  # streams whose worker died
    waits: list[float] = field(default_factory=list)  # of those, until another has them
    starts: list[float] = field(default_factory=list)
    whole_s: float | None = None  # all that can serve do
    rush: float = 0.0  # most begun in a second at a worker that is new, by the mean of all

    @property
    def choice_us(self) -> float:
        return 1e6 * fmean(self.choice_s)

    @property
    def most_starts(self) -> int:
        """In a tenth of a second."""
        return max(Counter(int(at * 10) for at in self.starts).values(), default=0)


class Cluster:
    """One run; deterministic but for what it measures of this machine."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self._chance = random.Random(seed)
        self.workers = [Worker(index, self._chance.random) for index in range(shape.workers)]
        self.gateways = [Gateway() for _ in range(shape.gateways)]
        self.breaker = BreakerPolicy()
        self.outcome = Outcome()
        self.now = 0.0
        self._serial = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._held: list[Worker] = []
        self._killed: list[Worker] = []

    def run(self) -> Outcome:
        shape = self.shape
        for gateway, worker in itertools.product(self.gateways, self.workers):
            self._connect(gateway, worker)
        for index in range(shape.streams):
            gateway = self.gateways[index % shape.gateways]
            self._send(Stream(gateway, call(), self._length()))
        self._at(0.0, self._report)
        self._at(0.0, self._break)
        self._at(shape.before_s, self._kill)
        end_s = shape.before_s + shape.after_s
        while self._events and self._events[0][0] <= end_s:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self._measure("at the end")
        return self._judged()

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._serial), act))

    def _length(self) -> float:
        return self._chance.expovariate(1 / self.shape.stream_s)

    # ---- streams

    def _send(self, stream: Stream) -> None:
        begun = time.thread_time()
        chosen = stream.gateway.balancer.choose(stream.gateway.seen.values(), stream.call)
        self.outcome.choice_s.append(time.thread_time() - begun)
        if chosen is None:
            stream.gateway.waiting.append(stream)
        else:
            self._begin(stream, chosen)

    def _begin(self, stream: Stream, chosen: Seen) -> None:
        chosen.take(stream)
        chosen.worker.began[int(self.now)] += 1
        if stream.waits_since:
            self.outcome.waits.append(self.now - stream.waits_since)
            stream.waits_since = 0.0
        stream.epoch += 1
        epoch, stream.until = stream.epoch, self.now + stream.left_s
        self._at(stream.until, lambda: self._end(stream, epoch))

    def _end(self, stream: Stream, epoch: int) -> None:
        if stream.epoch != epoch:
            return  # it went on elsewhere
        worker, gateway = stream.worker, stream.gateway
        assert worker is not None
        worker.drop(stream)
        stream.epoch += 1
        self._fill(gateway, worker)
        self._send(Stream(gateway, call(), self._length()))

    def _fill(self, gateway: Gateway, worker: Seen) -> None:
        while gateway.waiting and worker.credits > 0:
            stream = gateway.waiting.popleft()
            gateway.balancer.record_call(worker, stream.call)
            self._begin(stream, worker)

    def _connect(self, gateway: Gateway, worker: Worker) -> None:
        seen = Seen(worker, self.shape.slots, self.shape.gateways)
        gateway.seen[worker.name] = seen
        self._fill(gateway, seen)

    def _report(self) -> None:
        """What the supervisor tells all gateways: how much each worker has, a second ago."""
        counts: Counter[str] = Counter()
        for gateway in self.gateways:
            for name, seen in gateway.seen.items():
                counts[name] += len(seen.calls)
        told = tuple(
            ReplicaStatus(one.name, "ready", one.name, 1, "cpu", running=counts[one.name])
            for one in self.workers
            if one.serves
        )
        for gateway in self.gateways:
            gateway.balancer.set_status(ModelStatus("m", "-", "-", 0, told))
        self._at(self.now + REPORT_S, self._report)

    # ---- deaths

    def _break(self) -> None:
        for worker in self.workers[: self.shape.bad]:
            worker.bad = True
            for stream in self._lost(worker):
                self._send(stream)
        self.outcome.waits.clear()

    def _kill(self) -> None:
        self._measure("before")
        well = [worker for worker in self.workers if not worker.bad]
        self._killed = self._chance.sample(well, round(self.shape.kill * self.shape.workers))
        orphans = [stream for worker in self._killed for stream in self._lost(worker)]
        self.outcome.lost = len(orphans)
        for stream in orphans:  # each gateway hears of all deaths at once, by EOF
            self._send(stream)
        self._measure("after the deaths")

    def _lost(self, worker: Worker) -> list[Stream]:
        worker.serves = False
        found = []
        for gateway in self.gateways:
            for stream in gateway.seen.pop(worker.name).streams.values():
                stream.left_s, stream.waits_since = stream.until - self.now, self.now
                stream.epoch += 1
                found.append(stream)
        self._again(worker, fruitful=True)
        return found

    def _again(self, worker: Worker, *, fruitful: bool) -> None:
        if fruitful:
            self._tell(self.breaker.record_success)
        else:
            self._tell(lambda: self.breaker.fruitless_end(worker.name, self.now))
        after_s = worker.policy.after_s(fruitful=fruitful)
        self._at(self.now + after_s, lambda: self._try(worker))

    def _try(self, worker: Worker) -> None:
        hold = self.breaker.blocked_until(self.now)
        if hold is not None:
            self._held.append(worker)
            if hold.until is not None:
                self._at(hold.until, self._wake)
            return
        self.breaker.started(worker.name)
        if not worker.bad:
            self.outcome.starts.append(self.now - self.shape.before_s)
        took_s = self.shape.load_s * self._chance.uniform(0.9, 1.1)
        if worker.bad:
            self._at(self.now + 1.0, lambda: self._again(worker, fruitful=False))
        else:
            self._at(self.now + took_s, lambda: self._up(worker))

    def _tell(self, tell: Callable[[], None]) -> None:
        was = self.breaker.state
        tell()
        if self.breaker.state != was:
            self._wake()

    def _wake(self) -> None:
        held, self._held = self._held, []
        for worker in held:
            self._try(worker)

    def _up(self, worker: Worker) -> None:
        worker.serves, worker.back_s = True, self.now - self.shape.before_s
        self._tell(self.breaker.record_success)  # it answers at once, for there is work
        for gateway in self.gateways:
            self._connect(gateway, worker)

    # ---- what came of it

    def _measure(self, when: str) -> None:
        counts: Counter[str] = Counter()
        for gateway in self.gateways:
            for name, seen in gateway.seen.items():
                counts[name] += len(seen.calls)
        loads = sorted(counts.values())
        mean = fmean(loads)
        self.outcome.spread[when] = quantiles(loads, n=100)[98] / mean, loads[-1] / mean

    def _judged(self) -> Outcome:
        found = self.outcome
        back = [worker.back_s for worker in self._killed]
        if all(at is not None for at in back):
            found.whole_s = max((at for at in back if at is not None), default=0.0)
        begins = Counter(int(self.shape.before_s + at) for at in back if at is not None)
        means = {
            s: fmean(one.began[s] for one in self.workers if one.serves) or 1.0 for s in begins
        }
        found.rush = max(
            (
                worker.began[second] / means[second]
                for worker in self._killed
                if worker.back_s is not None
                for second in [int(self.shape.before_s + worker.back_s)]
            ),
            default=0.0,
        )
        return found


def call(prompt: str = "Why is the sky blue?", session: str = "") -> InflightRequest:
    return InflightRequest("m", SamplingParams(max_tokens=512), prompt=prompt, session=session)
