"""The load generator of one client process: requests in a closed or an open loop, and their
records.

There is no task per request: a connection calls back when its answer is complete, and the callback
sends the next request. Only opening a connection takes a task.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine, Iterator

from servekit.bench.client.client_protocol import (
    PATHS,
    ClientLoad,
    Ended,
    Record,
    Report,
    Target,
)
from servekit.bench.client.connection import Connection, Exchange
from servekit.bench.client.connection_pool import CONNECT_S, Dialer, Unreachable
from servekit.bench.lengths import Lengths
from servekit.bench.percentiles import Histogram
from servekit.bench.prompts import Conversation, Prompts

#: Pause of a closed loop's user after an error, so that a dead server is not hammered.
PAUSE_S = 0.1
#: Precision of timers: a smaller delay counts as the arrival itself, not as late.
TIMER_S = 0.002
_LOOK_EVERY_S = 0.02  # samples of the loop's lag
_SWEEP_EVERY_S = 0.1  # for requests that time out
_WARM_AT_ONCE = 8  # an open loop has no number of users
_WARM_NUMBERS = 10**9  # separates warm-up from measured conversations
#: Overdue arrivals sent in a row before answers are processed.
_IN_A_ROW = 16


class Driver:
    def __init__(self, order: ClientLoad) -> None:
        self._order = order
        self._prompts = Prompts(order.asking, order.seed)
        self._dialer = Dialer(order.target)
        self._head = request_head(order.target, PATHS[order.asking.api])
        self._keep_text = order.asking.turns != Lengths("fixed", 1)
        self._under_way: dict[Exchange, Connection | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet = asyncio.Event()
        self._limit: int | None = None
        self._next_number = _WARM_NUMBERS + order.index
        self._pausing = self._sent = self._resent = self._chunks = 0
        self._over = self._closed_loop = False
        self._records: list[Record] = []
        self._gaps: dict[int, int] = {}
        self._lags, self._late = Histogram(), Histogram()
        self._ended_at = self._began_at = self._began_cpu_s = self._cpu_cores = 0.0

    # ---- phases

    async def warm_up(self) -> None:
        """Send requests that are not counted, then open connections for the users."""
        order = self._order
        if order.warmup:
            await self._closed(order.users or _WARM_AT_ONCE, order.warmup)
        await self._dialer.open_ahead(order.users or 0)
        self._records, self._gaps, self._next_number = [], {}, order.index
        self._sent = self._resent = self._chunks = 0

    async def measure(self, at: float) -> None:
        """Send requests from the time `at` until the order's end, and wait for those in flight."""
        order = self._order
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        self._began_at, self._began_cpu_s = time.monotonic(), time.process_time()
        loop = asyncio.get_running_loop()
        loop.call_later(_LOOK_EVERY_S, self._measure_lag, loop, time.monotonic() + _LOOK_EVERY_S)
        if order.duration_s is not None:
            loop.call_later(at + order.duration_s - time.monotonic(), self._end_of_time)
        if order.users is not None:
            await self._closed(order.users, order.requests)
        else:
            await self._open(order.rate or 0.0, at)
        self._end_of_time()

    def stop_now(self) -> None:
        """Stop now; requests in flight are left unfinished."""
        self._end_of_time()
        for exchange, connection in list(self._under_way.items()):
            if connection is not None:
                connection.abort()
            exchange.end_exchange("unfinished")
            self._done(exchange, None)

    def report(self) -> Report:
        """Return the report since the last one."""
        records, self._records = self._records, []
        gaps, self._gaps = self._gaps, {}
        under_way = sum(exchange.record.chunks for exchange in self._under_way)
        chunks = self._chunks + under_way
        return Report(records, gaps, self._sent, len(self._under_way), chunks)

    def sum_up(self) -> Ended:
        lags, late = self._lags.counts, self._late.counts
        return Ended(self._ended_at, self._cpu_cores, lags, late, self._resent)

    def close(self) -> None:
        self._dialer.close()

    def _end_of_time(self) -> None:
        """Send no more requests; later chunks do not count as in time."""
        if self._over:
            return
        self._over, self._ended_at = True, time.monotonic()
        wall_s = max(1e-9, self._ended_at - self._began_at)
        self._cpu_cores = (time.process_time() - self._began_cpu_s) / wall_s
        for exchange in self._under_way:
            exchange.record.chunks_in_time = exchange.record.chunks
        self._finish_if_idle()

    # ---- loops

    async def _closed(self, users: int, requests: int | None) -> None:
        self._sent, self._limit, self._closed_loop = 0, requests, True
        for _ in range(users):
            self._begin(time.monotonic())
        await self._until_quiet()

    async def _open(self, rate: float, at: float) -> None:
        self._sent, self._limit, self._closed_loop = 0, self._order.requests, False
        source = random.Random(f"arrivals {self._order.seed} {self._order.index}")
        for count, after_s in enumerate(poisson_arrivals(rate, source)):
            due = at + after_s
            if (wait_s := due - time.monotonic()) > 0:
                await self._sleep(wait_s)
            elif count % _IN_A_ROW == 0:
                await asyncio.sleep(0)
            if self._over or self._limit_reached():
                break
            now = time.monotonic()
            self._late.add(max(0.0, now - due))
            self._begin(now if now - due < TIMER_S else due)
        await self._until_quiet()

    async def _sleep(self, wait_s: float) -> None:
        """Sleep, or return early at the end of the measurement."""
        while not self._over and wait_s > 0:
            step_s = min(wait_s, 0.2)
            await asyncio.sleep(step_s)
            wait_s -= step_s

    async def _until_quiet(self) -> None:
        self._quiet.clear()
        self._finish_if_idle()
        sweep = asyncio.create_task(self._sweep())
        try:
            await self._quiet.wait()
        finally:
            sweep.cancel()

    def _finish_if_idle(self) -> None:
        if not self._under_way and not (self._pausing and not self._over):
            self._quiet.set()

    def _limit_reached(self) -> bool:
        return self._limit is not None and self._sent >= self._limit

    def _begin(self, began: float) -> None:
        """Send the first request of the next conversation."""
        if not self._over and not self._limit_reached():
            number, self._next_number = self._next_number, self._next_number + self._order.clients
            self._send_request(self._prompts.conversation(number), "", began)

    # ---- one request

    def _send_request(self, conversation: Conversation, answer: str, began: float) -> None:
        def done(exchange: Exchange) -> None:
            if exchange.reused and not exchange.answered and exchange.record.outcome == "cut":
                self._ask_again(exchange, request)
            else:
                self._done(exchange, conversation)

        body = conversation.next_body(answer)
        request = b"%s%d\r\n\r\n%s" % (self._head, len(body), body)
        self._sent += 1
        self._send(request, Exchange(began, done, keep_text=self._keep_text))

    def _send(self, request: bytes, exchange: Exchange) -> None:
        connection = self._dialer.take_idle()
        self._under_way[exchange] = connection
        if connection is not None:
            connection.send_request(request, exchange)
        else:
            self._spawn(self._dial(request, exchange))

    async def _dial(self, request: bytes, exchange: Exchange) -> None:
        try:
            connection = await self._dialer.open_connection(min(CONNECT_S, self._order.timeout_s))
        except Unreachable as error:
            if exchange in self._under_way:
                exchange.end_exchange("connect", str(error))
                exchange.done(exchange)
            return
        if exchange not in self._under_way:
            connection.abort()
            return
        self._under_way[exchange] = connection
        connection.send_request(request, exchange)

    def _ask_again(self, exchange: Exchange, request: bytes) -> None:
        """Repeat a request once after the server closed a kept connection, which is no failure."""
        del self._under_way[exchange]
        self._resent += 1
        again = Exchange(exchange.record.began, exchange.done, keep_text=self._keep_text)
        self._under_way[again] = None
        self._spawn(self._dial(request, again))

    def _done(self, exchange: Exchange, conversation: Conversation | None) -> None:
        del self._under_way[exchange]
        record = exchange.record
        self._chunks += record.chunks
        if not self._over:
            record.chunks_in_time = record.chunks
        exchange.count_gaps(self._gaps)
        self._records.append(record)
        if conversation is not None and not self._over:
            self._go_on(exchange, conversation)
        self._finish_if_idle()

    def _go_on(self, exchange: Exchange, conversation: Conversation) -> None:
        if exchange.record.outcome != "ok":
            if self._closed_loop:
                self._pausing += 1
                asyncio.get_running_loop().call_later(PAUSE_S, self._after_pause)
        elif conversation.left and not self._limit_reached():
            self._send_request(conversation, exchange.text, time.monotonic())
        elif self._closed_loop:
            self._begin(time.monotonic())

    def _after_pause(self) -> None:
        self._pausing -= 1
        self._begin(time.monotonic())
        self._finish_if_idle()

    # ---- monitoring

    async def _sweep(self) -> None:
        """Fail the requests that have timed out."""
        limit_s = self._order.timeout_s
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            oldest = time.monotonic() - limit_s
            for exchange, connection in list(self._under_way.items()):
                if exchange.record.began < oldest and connection is not None:
                    connection.give_up("timeout", f"no whole answer within {limit_s:g} s")

    def _measure_lag(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        """Measure the delay of the loop's timers."""
        if not self._over:
            now = time.monotonic()
            self._lags.add(max(0.0, now - due))
            loop.call_later(_LOOK_EVERY_S, self._measure_lag, loop, now + _LOOK_EVERY_S)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def request_head(target: Target, path: str) -> bytes:
    """Return the head of a POST up to the value of its content-length."""
    key = f"authorization: Bearer {target.key}\r\n" if target.key else ""
    return (
        f"POST {target.base}{path} HTTP/1.1\r\nhost: {target.netloc}\r\n{key}"
        "content-type: application/json\r\naccept: */*\r\nuser-agent: servekit-bench\r\n"
        "content-length: "
    ).encode()


def poisson_arrivals(rate: float, source: random.Random) -> Iterator[float]:
    """Yield arrival times in seconds from the start, `rate` per second on average, without end.

    The gaps are exponential and independent. Several such processes add up to one with the sum of
    their rates, so that clients can share a rate without coordination.
    """
    now = 0.0
    while True:
        now += source.expovariate(rate)
        yield now
