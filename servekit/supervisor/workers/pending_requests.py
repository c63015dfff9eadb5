"""The admin requests of one worker that are not answered yet: for its adapters, and its sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from servekit.protocol.adapters import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from servekit.protocol.residency import Asleep, Awake, Sleep, SleepFailed, Wake
from servekit.supervisor.adapters.state import Refusal

AdminRequest = LoadAdapter | UnloadAdapter | Sleep | Wake
FromWorker = AdapterLoaded | AdapterUnloaded | AdapterRefused | Asleep | Awake | SleepFailed
Answer = AdapterLoaded | AdapterUnloaded | Asleep | Awake | Refusal

#: The number of requests to sleep or wake, which have none: one at a time is open.
_SLEEP = 0


@dataclass(frozen=True, slots=True)
class _Open:
    what: str  # "loaded the adapter 'x'"
    loads_adapter: bool
    answer: asyncio.Future[Answer]


class PendingRequests:
    """The open requests of one incarnation of a worker.

    Each is answered: by the worker, or by its death.
    """

    def __init__(self) -> None:
        self._last_number = _SLEEP
        self._open: dict[int, _Open] = {}

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @property
    def loads_adapter(self) -> bool:
        """Return whether it loads an adapter, during which its engine may do nothing else."""
        return any(request.loads_adapter for request in self._open.values())

    def next_number(self) -> int:
        """Return the number of the next request that is about an adapter."""
        self._last_number += 1
        return self._last_number

    async def send(
        self,
        request: AdminRequest,
        send: Callable[[AdminRequest], None],
        what: str,
        late: Callable[[], None],
        deadline_s: float,
    ) -> Answer:
        """Send a request and return its answer; call `late` after `deadline_s` to end the worker.

        `what` is the request in the past tense, for the answer if the worker dies.
        """
        loop = asyncio.get_running_loop()
        number = _SLEEP if isinstance(request, Sleep | Wake) else request.seq
        if number in self._open:
            return Refusal("it was asked to sleep or wake already, and has not answered")
        pending = _Open(what, isinstance(request, LoadAdapter), loop.create_future())
        self._open[number] = pending
        timer = loop.call_later(deadline_s, late)
        try:
            send(request)
            return await pending.answer
        finally:
            timer.cancel()
            self._open.pop(number, None)

    def take_answer(self, message: FromWorker) -> None:
        """Answer the request that the worker's message belongs to, if it is still open."""
        match message:
            case Asleep() | Awake():
                self._resolve(_SLEEP, message)
            case SleepFailed(reason):
                self._resolve(_SLEEP, Refusal(reason))
            case AdapterRefused(number, reason, invalid):
                self._resolve(number, Refusal(reason, invalid))
            case _:
                self._resolve(message.seq, message)

    def answer_death(self, worker: str, reason: str) -> None:
        """Answer all requests to a worker that died of `reason`; "" if it was told to end."""
        for number, pending in self._open.items():
            message = f"worker {worker} died while it {pending.what}: {reason}"
            self._resolve(number, Refusal(message, died=True, left=not reason))

    def _resolve(self, number: int, answer: Answer) -> None:
        pending = self._open.get(number)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(answer)
