"""The adapter orders of one worker that are not answered yet."""

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
from servekit.supervisor.adapters.state import Refusal

Order = LoadAdapter | UnloadAdapter
Answer = AdapterLoaded | AdapterUnloaded | AdapterRefused


@dataclass(frozen=True, slots=True)
class _Open:
    what: str  # "loaded the adapter 'x'"
    loads: bool
    answer: asyncio.Future[AdapterLoaded | AdapterUnloaded | Refusal]


class PendingRequests:
    """The open orders of one incarnation of a worker.

    Each is answered: by the worker, or by its death.
    """

    def __init__(self) -> None:
        self._seq = 0
        self._open: dict[int, _Open] = {}

    @property
    def open(self) -> bool:
        return bool(self._open)

    @property
    def loading(self) -> bool:
        """Return whether it loads an adapter, during which its engine may do nothing else."""
        return any(errand.loads for errand in self._open.values())

    async def send(
        self,
        make: Callable[[int], Order],
        send: Callable[[Order], None],
        what: str,
        late: Callable[[], None],
        deadline_s: float,
    ) -> AdapterLoaded | AdapterUnloaded | Refusal:
        """Send an order and return its answer; call `late` after `deadline_s` to end the worker."""
        loop = asyncio.get_running_loop()
        self._seq += 1
        seq, order = self._seq, make(self._seq)
        errand = _Open(what, isinstance(order, LoadAdapter), loop.create_future())
        self._open[seq] = errand
        timer = loop.call_later(deadline_s, late)
        try:
            send(order)
            return await errand.answer
        finally:
            timer.cancel()
            self._open.pop(seq, None)

    def answered(self, message: Answer) -> None:
        errand = self._open.get(message.seq)
        if errand is None or errand.answer.done():
            return
        if isinstance(message, AdapterRefused):
            errand.answer.set_result(Refusal(message.message, message.invalid))
        else:
            errand.answer.set_result(message)

    def died(self, worker: str, reason: str) -> None:
        """Answer all orders of a worker that died of `reason`; "" if it was told to end."""
        for errand in self._open.values():
            message = f"worker {worker} died while it {errand.what}: {reason}"
            if not errand.answer.done():
                errand.answer.set_result(Refusal(message, died=True, left=not reason))
