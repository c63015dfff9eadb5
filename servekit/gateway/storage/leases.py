"""Stored work that several gateways share: each runs what it holds the lease of.

A gateway renews its leases every second; work whose lease has ended is another gateway's. Every
change of a row names the lease's owner, so that a gateway that was thought dead changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from servekit.gateway.routing.router import IncompleteRequest, Router
from servekit.gateway.storage.store_file import ResponsesUnavailable, StoreFile, await_work
from servekit.system.timers import next_tick_s

#: How long a gateway that is silent keeps what it holds.
LEASE_S = 6.0
LOOK_EVERY_S = 1.0
#: The same at rest: nothing is held or was put back lately, no other gateway stores work, and none
#: of an earlier life can be leased any more.
LOOK_AT_REST_S = 15.0
#: The owner of rows that were put back.
_PUT_BACK = "put back"


class Leased(Protocol):
    """A row that is leased."""

    @property
    def id(self) -> str: ...


_Row = TypeVar("_Row", bound=Leased)
_T = TypeVar("_T")


def claim_rows(
    file: sqlite3.Connection, table: str, active: str, order: str, owner: str, most: int
) -> None:
    """Renew the leases of `owner`, and give it rows that nobody runs, up to `most` in all.

    `active` is the condition on rows that can run, `order` ranks those that are taken. Rows that
    were put back come after all others.
    """
    now_s = time.time()
    # a lease of the far future is of a clock that has jumped back
    free = f"{active} AND (owner = ?1 OR leased_until < ?2 OR leased_until > ?3 + ?4)"
    ranked = f"owner <> ?1, (owner = ?6) * leased_until, {order}"
    chosen = f"SELECT id FROM {table} WHERE {free} ORDER BY {ranked} LIMIT ?5"
    query = f"UPDATE {table} SET owner = ?1, leased_until = ?3 WHERE id IN ({chosen})"
    file.execute(query, (owner, now_s, now_s + LEASE_S, LEASE_S, most, _PUT_BACK))


def _end_leases(file: sqlite3.Connection, table: str, owner: str) -> None:
    file.execute(f"UPDATE {table} SET leased_until = 0 WHERE owner = ?", (owner,))


class LeasedStore:
    """A file with a table of work that gateways lease; this gateway is `_owner`."""

    def __init__(self, file: StoreFile, table: str) -> None:
        self._file, self._table = file, table
        self._owner = secrets.token_hex(8)

    async def _run(
        self, work: Callable[[sqlite3.Connection], _T], *, may_use_reserve: bool = False
    ) -> _T:
        return await await_work(self._file.submit(work, may_use_reserve=may_use_reserve))

    async def put_back(self, id: str, pause_s: float) -> None:
        """Give up a row that this gateway holds, for `pause_s` or LEASE_S to all gateways.

        Others that wait take its place meanwhile.
        """
        values = _PUT_BACK, time.time() + min(pause_s, LEASE_S), id, self._owner

        def give_up(file: sqlite3.Connection) -> None:
            query = f"UPDATE {self._table} SET owner = ?, leased_until = ?"
            file.execute(f"{query} WHERE id = ? AND owner = ?", values)

        await self._run(give_up)

    def close(self) -> None:
        """Give up all leases, so that another gateway goes on at once."""
        self._file.submit(lambda file: _end_leases(file, self._table, self._owner))
        self._file.close()


class LeaseRunner(Generic[_Row]):
    """Runs the rows that this gateway holds, each in a task."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Set to look at once.
        self.woken = asyncio.Event()
        router.access.on_change(self.woken.set)  # rows may be run now
        router.listeners.append(self.woken.set)  # a request may have stored some

    async def claim(self) -> Sequence[_Row] | None:
        """Return all rows that this gateway holds; None if it may run none by its rules."""
        raise NotImplementedError

    async def work(self, row: _Row) -> None:
        """Run a row to its end, or until it cannot go on now: then it is claimed again."""
        raise NotImplementedError

    @contextlib.contextmanager
    def delay_end(self) -> Iterator[None]:
        """Let a gateway that drains end only after what is within, such as storing an answer.

        Raises ModelUnavailable if it drains already.
        """
        unstored = IncompleteRequest(0, lambda _: None)
        self._router.hold_incomplete(unstored)
        try:
            yield
        finally:
            self._router.release_incomplete(unstored)

    async def run_held_rows(self) -> None:
        """Run rows until cancelled."""
        loop = asyncio.get_running_loop()
        rests_at_s = loop.time() + 2 * LEASE_S
        try:
            while True:
                self.woken.clear()
                every_s: float | None = LOOK_EVERY_S
                with contextlib.suppress(ResponsesUnavailable):  # the log has it
                    if (held := await self.claim()) is None:
                        every_s = None
                    else:
                        self._follow(held)
                        if held:
                            rests_at_s = loop.time() + 2 * LEASE_S
                        has_peers = self._router.sources.has_peers
                        if not (has_peers or loop.time() < rests_at_s):
                            every_s = LOOK_AT_REST_S
                wait_s = None if every_s is None else next_tick_s(every_s, loop.time())
                # not by wait_for: Python 3.11's forgets a cancellation if the event is set then
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self.woken.wait()
        finally:
            running = list(self._tasks.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _follow(self, held: Sequence[_Row]) -> None:
        ids = {row.id for row in held}
        for id, task in self._tasks.items():
            if id not in ids:
                task.cancel()  # it is another gateway's, or gone
        for row in held:
            if row.id not in self._tasks:
                task = asyncio.get_running_loop().create_task(self.work(row))
                self._tasks[row.id] = task
                task.add_done_callback(partial(self._forget, row.id))

    def _forget(self, id: str, _: asyncio.Task[None]) -> None:
        del self._tasks[id]
