"""The rollout of a model's adapters to its workers, one change at a time.

A load goes to all workers that serve, and is decided when all have answered
(`state.combine_outcomes`). A worker that comes up waits for the change that is under way, and is
then brought up to date before it serves: no request ever meets a worker that lacks an adapter of
the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from servekit.protocol.adapters import AdapterInfo, AdapterSpec, AdapterStatus
from servekit.supervisor.adapters.state import (
    AdapterTable,
    Entry,
    Later,
    Outcome,
    Refusal,
    combine_outcomes,
    no_ready_worker,
)
from servekit.supervisor.event_log import journal

if TYPE_CHECKING:
    from servekit.supervisor.deployments.deployment import Deployment
    from servekit.supervisor.workers.worker_process import WorkerProcess

log: Any = structlog.get_logger("servekit.supervisor")

_LOOK_EVERY_S = 0.02


class Adapters:
    """The adapters of one version of a model. `book` is their table of states."""

    def __init__(self, model: str, file: Sequence[AdapterSpec], owner: Deployment) -> None:
        self.model = model
        self.book = AdapterTable(file, time.time())
        self._owner = owner
        self._turn = asyncio.Lock()  # first come, first served
        self._following: set[asyncio.Task[None]] = set()
        self._outdated: dict[str, set[str]] = {}  # by worker: adapters it may hold, now removed
        self._claimed: set[str] = set()  # all names that the configuration uses

    def statuses(self, serving: Sequence[Mapping[str, AdapterInfo]]) -> tuple[AdapterStatus, ...]:
        """Return the status of all adapters, given what each serving worker holds."""
        return self.book.statuses(serving)

    def make_successor(self, file: Sequence[AdapterSpec], claimed: Collection[str]) -> Adapters:
        """Return the next version's adapters: the file's, and those operators added to this one."""
        made = Adapters(self.model, file, self._owner)
        for spec in self.added:
            if spec.name not in claimed:
                made.book.expect(spec, time.time(), from_file=False)
        made._claimed = set(claimed)
        return made

    @property
    def added(self) -> tuple[AdapterSpec, ...]:
        """The adapters that operators have added, and that workers start with."""
        return self.book.expected(from_file=False)

    def adopt_added(self, added: Sequence[AdapterSpec]) -> None:
        """Adopt adapters that operators added under an earlier supervisor, as a worker reports."""
        names = {*self._claimed, *(entry.spec.name for entry in self.book)}
        unknown = [spec for spec in added if spec.name not in names]
        for spec in unknown:
            log.info("adapter_kept", model=self.model, adapter=spec.name)
            self.book.expect(spec, time.time(), from_file=False)
        if unknown:
            self._begin(self._complete(unknown))
            self._owner.changed()

    async def _complete(self, specs: Sequence[AdapterSpec]) -> None:
        """Load adapters on the workers that came up before these were known."""
        async with self._turn:
            for spec in specs:
                lacking = [one for one in self._serving() if spec.name not in one.held_adapters]
                if not lacking or spec not in self.book.expected():
                    continue
                outcome = await self._load(lacking, spec)
                if isinstance(outcome, AdapterInfo):
                    self._serve(spec.name, outcome)
                else:
                    self._fail(spec.name, outcome)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    def stop_changes(self) -> None:
        """Cancel the changes that follow the file."""
        for task in self._following:
            task.cancel()

    # ---- for operators

    async def add_adapter(self, spec: AdapterSpec, *, in_place: bool = False) -> Outcome | Later:
        """Load an adapter on all workers or on none; with its model, if that is unloaded."""
        async with self._turn:
            known = self.book.get(spec.name)
            if known is not None and (refusal := _refuse_again(known, spec, in_place=in_place)):
                return refusal
            from_file = bool(known and known.from_file)
            if self._owner.is_away and not self._serving():
                await self._expect(spec, from_file=from_file)
                return Later()
            return await self._exchange(known, spec, from_file=from_file)

    async def remove_adapter(self, name: str) -> Refusal | None:
        """Unload an adapter from all workers, once no request needs it."""
        async with self._turn:
            if self.book.get(name) is None:
                return Refusal(f"The lora adapter '{name}' cannot be found.", invalid=True)
            await self._remove(name)
            return None

    # ---- for the file

    def needs_load(self, file: Sequence[AdapterSpec]) -> bool:
        """Return whether an adapter of the file has to be loaded: it failed, or is not there."""
        known = [(spec, self.book.get(spec.name)) for spec in file]
        return any(
            entry is None or entry.state == "failed" or entry.spec != spec for spec, entry in known
        )

    def follow_file(self, file: Sequence[AdapterSpec], claimed: Collection[str]) -> None:
        """Load the adapters that the file names now, and unload those it no longer names.

        Adapters of operators stay, unless the file gives their name to something else: `claimed`.
        """
        self._claimed = set(claimed)
        self._begin(self._apply_file(tuple(file), set(claimed)))

    async def _apply_file(self, file: tuple[AdapterSpec, ...], claimed: set[str]) -> None:
        named = {spec.name: spec for spec in file}
        async with self._turn:
            for entry in self.book:
                name = entry.spec.name
                gone = entry.from_file or name in claimed
                if gone and named.get(name) != entry.spec:
                    await self._remove(name)
            for name, spec in named.items():
                await self._have(name, spec)

    async def _have(self, name: str, spec: AdapterSpec) -> None:
        known = self.book.get(name)
        if known is not None and known.state != "failed":
            self.book.adopt(name)
            self._owner.changed()
        elif not self._serving():
            await self._expect(spec, from_file=True)
        else:
            await self._exchange(known, spec, from_file=True)

    # ---- for workers

    def expected(self) -> tuple[AdapterSpec, ...]:
        """Return the adapters that a new worker starts with."""
        return self.book.expected()

    async def join(
        self, worker: WorkerProcess, refused: Mapping[str, str], admit: Callable[[], None]
    ) -> str:
        """Bring a worker up to date that has loaded its model, and let it serve by `admit`.

        Returns why it cannot serve, or "". `refused` are the adapters that it has refused at its
        start, with the reasons.
        """
        async with self._turn:
            for name in self._surplus(worker):
                if not await worker.ask_to_unload(name):
                    return ""
            for spec in self.book.expected():
                outcome = await self._fetch(worker, spec, refused)
                if isinstance(outcome, AdapterInfo):
                    self._serve(spec.name, outcome)
                elif outcome.left:
                    return ""
                elif any(spec.name in other.held_adapters for other in self._serving()):
                    return f"the adapter {spec.name!r}: {outcome.message}"
                else:
                    self._fail(spec.name, outcome)
                    if outcome.died:
                        return outcome.message
            admit()
        return ""

    def _surplus(self, worker: WorkerProcess) -> list[str]:
        """Return the adapters to unload: not expected, or removed since the worker loaded them."""
        outdated = self._outdated.pop(worker.name, set())
        return list(
            {
                *self.book.surplus_adapters(list(worker.held_adapters)),
                *outdated.intersection(worker.held_adapters),
            }
        )

    async def _fetch(
        self, worker: WorkerProcess, spec: AdapterSpec, refused: Mapping[str, str]
    ) -> Outcome:
        """Return a new worker's outcome for an adapter; load it if the worker has not tried."""
        if (info := worker.held_adapters.get(spec.name)) is not None:
            return info
        if spec.name in refused:
            return Refusal(refused[spec.name])
        return await worker.ask_to_load(spec)

    # ---- changes, one at a time

    async def _exchange(
        self, known: Entry | None, spec: AdapterSpec, *, from_file: bool
    ) -> Outcome | Later:
        """Load an adapter in place of any with its name; if it is refused, restore that one."""
        if not self._serving():
            return no_ready_worker(self.model)
        self.book.add_requested(spec, time.time(), from_file=from_file)
        self._owner.changed()
        if known is not None:
            await self._until_unused(spec.name)
            await self._unload(spec.name)
        workers = self._serving()  # some may have died, or fallen asleep, meanwhile
        if not workers and self._owner.is_away:
            await self._expect(spec, from_file=from_file)
            return Later()
        outcome = await self._load(workers, spec)
        if isinstance(outcome, AdapterInfo):
            log.info("adapter_serving", model=self.model, adapter=spec.name, workers=len(workers))
            self._serve(spec.name, outcome)
        else:
            self._record_event(spec.name, f"refused: {outcome.message}")
            log.error(
                "adapter_refused", model=self.model, adapter=spec.name, reason=outcome.message
            )
            await self._go_back(known, spec, outcome, from_file=from_file)
        self._owner.changed()
        return outcome

    async def _expect(self, spec: AdapterSpec, *, from_file: bool) -> None:
        """Have workers load it when they start, in place of any adapter with its name."""
        if self.book.get(spec.name) is not None:
            await self._remove(spec.name)
        self.book.expect(spec, time.time(), from_file=from_file)
        self._owner.changed()

    async def _go_back(
        self, known: Entry | None, spec: AdapterSpec, refusal: Refusal, *, from_file: bool
    ) -> None:
        if known is not None and known.state == "serving":
            again = await self._load(self._serving(), known.spec)
            self.book.restore(known)
            if isinstance(again, Refusal) and self._serving():  # else those that start load it
                self._fail(known.spec.name, again)
        elif from_file or known is not None:
            self._fail(spec.name, refusal)
        else:
            self.book.forget_adapter(spec.name)

    async def _load(self, workers: Sequence[WorkerProcess], spec: AdapterSpec) -> Outcome:
        outcomes = await asyncio.gather(*(worker.ask_to_load(spec) for worker in workers))
        outcome = combine_outcomes(self.model, outcomes)
        if isinstance(outcome, Refusal):
            await self._unload(spec.name)
        return outcome

    async def _remove(self, name: str) -> None:
        self.book.mark_leaving(name, time.time())
        self._owner.changed()
        await self._until_unused(name)
        await self._unload(name)
        for worker in self._owner.workers(self):
            if not worker.serves:  # asleep or starting: it may hold the adapter
                self._outdated.setdefault(worker.name, set()).add(name)
        self.book.forget_adapter(name)
        self._owner.changed()
        log.info("adapter_unloaded", model=self.model, adapter=name)
        self._record_event(name, "unloaded")

    async def _unload(self, name: str) -> None:
        holders = [worker for worker in self._serving() if name in worker.held_adapters]
        await asyncio.gather(*(worker.ask_to_unload(name) for worker in holders))

    async def _until_unused(self, name: str) -> None:
        """Wait until gateways have finished their requests for it, waiting ones included.

        Without a worker that serves they cannot: the next one waits for this change.
        """
        deadline = time.monotonic() + self._owner.drain_timeout_s
        await asyncio.sleep(0)  # gateways get the change within this event-loop tick
        while self._serving() and time.monotonic() < deadline:
            if self._owner.is_unused(name):
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _serving(self) -> list[WorkerProcess]:
        return [worker for worker in self._owner.workers(self) if worker.serves]

    def _serve(self, name: str, info: AdapterInfo) -> None:
        known = self.book.get(name)
        if known is not None and known.state != "serving":
            self.book.mark_serving(name, info, time.time())
            self._record_event(name, "serves")

    def _fail(self, name: str, refusal: Refusal) -> None:
        log.error("adapter_failed", model=self.model, adapter=name, reason=refusal.message)
        self._record_event(name, f"failed: {refusal.message}")
        self.book.mark_failed(name, refusal.message, time.time())
        self._owner.changed()

    def _record_event(self, name: str, what: str) -> None:
        journal.record_event("adapter", f"{name} {what}", model=self.model, adapter=name)


def _refuse_again(known: Entry, spec: AdapterSpec, *, in_place: bool) -> Refusal | None:
    """Return why the existing adapter keeps this name; None if it may be loaded again."""
    name = spec.name
    if known.from_file and known.spec != spec:
        said = f"the adapter {name!r} is the configuration file's: change it there, and reload"
        return Refusal(said, invalid=True)
    if known.state == "failed" or in_place:
        return None
    return Refusal(
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in"
        " place, set 'load_inplace' to True.",
        invalid=True,
    )
