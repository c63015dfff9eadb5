"""Delivery of an engine step's tokens to the streams of one worker: the hottest path."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

from servekit.gateway.telemetry.metrics import UNMEASURED

if TYPE_CHECKING:
    from servekit.gateway.generation.stream_writer import StreamWriter
    from servekit.gateway.routing.request import InflightRequest
    from servekit.protocol.messages import TokenBatch


def take_one_each(calls: Mapping[int, InflightRequest], told: TokenBatch) -> None:
    """Deliver an engine step, one more token for each of its calls; `calls` are by wire id.

    Does the work of `InflightRequest.take` in one loop, reading the clock once for all requests.
    Requests that already hold unwritten text have been scheduled for writing.
    """
    now_s, find = monotonic(), calls.get
    pumps: list[StreamWriter] = []
    meter, last_s, alike = UNMEASURED, now_s, 0
    for id, text, token_id in zip(told.ids, told.texts, told.token_ids, strict=True):
        call = find(id)
        if call is None:
            continue  # cancelled meanwhile
        call.emitted.append(token_id)
        call.chars += len(text)
        if (texts := call.texts) is None:
            call.add(text, token_id)
        else:
            texts.append(text)
        if call.stream:
            if call.last_s != last_s or call.meter is not meter:
                meter.next(now_s - last_s, alike)
                meter, last_s, alike = call.meter, call.last_s, 0
            alike += 1
            call.last_s = now_s
            if texts is None or len(texts) == 1:
                if (pump := call.pump) is not None:
                    pumps.append(pump)
                else:
                    call.wake()
    meter.next(now_s - last_s, alike)
    if pumps:
        pumps[0].cork.add_all(pumps)  # all writers of a gateway share one
