"""The interfaces of whoever watches requests: metrics, traces, quotas and the request log.

A request calls its observers at the stations of its life:

    on_sent ─ on_first_token ─ … ─ on_ended
      ↑  on_requeued: its worker died, or gave it back
      └──────┘

Most watch only the end (`EndObserver`), so that the other stations cost nothing for them. Tokens
after the first are no station: for each of them only `RequestMeter.count_tokens` is called, once
for all streams of an engine step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest
    from servekit.protocol.messages import Delta


class EndObserver:
    """An observer of the ends of calls."""

    __slots__ = ()

    def on_ended(self, call: InflightRequest, outcome: str, last: Delta | None) -> None:
        """Note the end of a call: its outcome, and its last delta, None if it failed."""


class RequestObserver(EndObserver):
    """An observer that ignores all events; subclasses override those they need."""

    __slots__ = ()

    def on_sent(self, call: InflightRequest, *, again: bool) -> None:
        """Note that a call is sent to `call.replica`, a worker, for the first time or `again`."""

    def on_requeued(self, call: InflightRequest) -> None:
        """Note that a call waits again, because its worker died or gave it back."""

    def on_first_token(self, call: InflightRequest) -> None:
        """Note a call's first token, at `call.first_s`."""
