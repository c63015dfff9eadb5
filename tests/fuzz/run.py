"""Sends the cases over several connections at once, and keeps what was wrong."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.fuzz.cases import Case, Manner
from tests.fuzz.client import Client, Ended, Malformed
from tests.fuzz.verdict import Wrong, check

#: For one case, however busy the machine.
DEADLINE_S = 60.0
#: A connection that has been idle for so long may have been closed by the server, rightly.
IDLE_S = 3.0
#: After so many failures there is nothing more to learn.
MAX_FAILURES = 300


@dataclass(slots=True)
class Row:
    """What came of the cases of one endpoint."""

    requests: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest: int = -1  # its case


@dataclass(slots=True)
class Failure:
    what: str
    case: Case


class Cases(Protocol):
    def case(self, number: int) -> Case: ...


class Fuzz:
    """One run against one server."""

    def __init__(self, host: str, port: int, maker: Cases, requests: int) -> None:
        self._address = (host, port)
        self._maker = maker
        self._left = iter(range(requests))
        self._requests = requests
        self.done = 0
        self.rows: dict[str, Row] = {}
        self.failures: list[Failure] = []

    @property
    def progress(self) -> float:
        return self.done / self._requests

    async def run(self, tasks: int, sample: Callable[[float], None]) -> None:
        """Send everything; `sample` is called with the progress, several times a second."""
        sampling = asyncio.create_task(self._sample(sample))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(tasks):
                    group.create_task(self._work())
        finally:
            sampling.cancel()

    async def _sample(self, sample: Callable[[float], None]) -> None:
        while True:
            sample(self.progress)
            await asyncio.sleep(0.05)

    async def _work(self) -> None:
        line = Line(*self._address)
        for number in self._left:
            if len(self.failures) > MAX_FAILURES:
                break
            case = self._maker.case(number)
            await self._send(line, case)
            self.done += 1
        line.drop()

    async def _send(self, line: Line, case: Case) -> None:
        row = self.rows.setdefault(case.endpoint, Row())
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                statuses = await line.talk(case)
        except TimeoutError:
            self._fail(line, case, f"not done within {DEADLINE_S:g} s")
            statuses = ["hung"]
        except (Wrong, Malformed, Ended, OSError) as error:
            self._fail(line, case, f"{type(error).__name__}: {error}")
            statuses = ["wrong"]
        row.requests += max(1, len(case.asked))
        row.statuses.update(statuses)
        took_s = time.monotonic() - began_s
        if took_s > row.slowest_s:
            row.slowest_s, row.slowest = took_s, case.number

    def _fail(self, line: Line, case: Case, what: str) -> None:
        line.drop()
        self.failures.append(Failure(what, case))


class Line:
    """A connection that is kept as long as the server keeps it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._client: Client | None = None
        self._used_s = 0.0

    def drop(self, *, reset: bool = False) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close(reset=reset)

    async def talk(self, case: Case) -> list[str]:
        """Send a case and judge all that comes; what came, by status."""
        if time.monotonic() - self._used_s > IDLE_S or case.manner is Manner.BROKEN:
            self.drop()
        client = self._client = self._client or await Client.connect(*self._address)
        for piece in case.pieces:
            client.send(piece)
            await client.turn()
        match case.manner:
            case Manner.WHOLE:
                statuses = await self._due(client, case)
            case Manner.CUT:
                statuses = await self._leave(client, case)
            case Manner.BROKEN:
                statuses = await self._whatever(client, case)
        self._used_s = time.monotonic()
        return statuses

    async def _due(self, client: Client, case: Case) -> list[str]:
        """An answer for each request; none are due after one that says it closes."""
        statuses: list[str] = []
        for asked in case.asked:
            answer = await client.answer(asked.method)
            check(asked, answer)
            statuses.append(str(answer.status))
            if answer.closes:
                self.drop()
                break
        return statuses

    async def _leave(self, client: Client, case: Case) -> list[str]:
        left = case.leave_after_bytes
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.5):
                while left > 0 and (got := await client.some(left)):
                    left -= len(got)
        self.drop(reset=case.reset)
        return ["left"]

    async def _whatever(self, client: Client, case: Case) -> list[str]:
        """Refusals, or nothing, and then the end."""
        client.end()
        statuses: list[str] = []
        try:
            while True:
                answer = await client.answer(case.asked[0].method)
                check(case.asked[0], answer)
                statuses.append(str(answer.status))
        except Ended:
            self.drop()
        return statuses or ["closed"]
