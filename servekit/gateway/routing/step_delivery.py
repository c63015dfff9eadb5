"""Delivery of an engine step's tokens to the streams of one worker: the hottest path.

Readers run once at the end of the event-loop tick, however many tokens the tick brings them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import TYPE_CHECKING

from servekit.gateway.telemetry.metrics import UNMEASURED

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest, Reader
    from servekit.protocol.messages import TokenBatch


class EndOfTick:
    """The readers with news in this tick, run in that order when the tick is over.

    All of them share one `call_soon`, whose cost for each token of each stream would be notable.
    """

    __slots__ = ("_due", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: dict[Reader, None] = {}

    def add(self, reader: Reader) -> None:
        """Run `reader` at the end of the tick, once however often it is added."""
        due = self._due
        if not due:
            self._loop.call_soon(self._pop)
        due[reader] = None

    def add_all(self, readers: Iterable[Reader]) -> None:
        """Add several readers, as `add` does."""
        due = self._due
        if not due:
            self._loop.call_soon(self._pop)
        due.update(dict.fromkeys(readers))

    def _pop(self) -> None:
        due, self._due = self._due, {}
        for reader in due:
            reader.read_news()


def feed_step(calls: Mapping[int, InflightRequest], told: TokenBatch) -> None:
    """Deliver an engine step, one more token for each of its calls; `calls` are by wire id.

    Does the work of `InflightRequest.feed` in one loop, reading the clock once for all requests.
    Readers of requests that already hold unread text have been scheduled.
    """
    now_s, find = monotonic(), calls.get
    readers: list[Reader] = []
    meter, last_s, alike = UNMEASURED, now_s, 0
    for id, text, token_id in zip(told.ids, told.texts, told.token_ids, strict=True):
        call = find(id)
        if call is None:
            continue  # cancelled meanwhile
        call.emitted.append(token_id)
        call.chars += len(text)
        texts = call.texts
        texts.append(text)
        if call.stream:
            if call.last_s != last_s or call.meter is not meter:
                if alike:
                    meter.count_tokens(now_s - last_s, alike)
                meter, last_s, alike = call.meter, call.last_s, 0
            alike += 1
            call.last_s = now_s
            if len(texts) == 1:
                if (reader := call.reader) is not None:
                    readers.append(reader)
                else:
                    call.wake()
    if alike:
        meter.count_tokens(now_s - last_s, alike)
    if readers:
        readers[0].end_of_tick.add_all(readers)  # all readers of a gateway share one
