"""The context of an HTTP request: its id, its client's address, and its trace.

The id is the client's `X-Request-Id` if that is safe to log, else a new one. It is sent in the
response's header and to the worker, and is in each log line about the request.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any

from servekit import logging_config
from servekit.gateway.telemetry.observer import EndObserver

if TYPE_CHECKING:
    from servekit.gateway.routing.request import InflightRequest
    from servekit.protocol.messages import Delta

HEADER = b"x-request-id"
TRACEPARENT = b"traceparent"
#: Warning about a request that was answered nevertheless.
WARNING = b"servekit-warning"
#: Ids that are safe in a log, a header and a command line.
_fit = re.compile(rb"[A-Za-z0-9._:/=+@-]{1,128}").fullmatch
#: Prefix of generated ids, unique to this process.
_PREFIX = secrets.token_hex(6).encode() + b"-%06x"
_numbers = itertools.count(1)


#: Model, key, outcome, prompt, cached and completion tokens, times of the start and first token.
CallFacts = tuple[str, str, str, int, int, int, float, float]
_MOST_CHARS = 200


def _sum_calls(one: CallFacts, other: CallFacts) -> CallFacts:
    """Add up the tokens of two calls of a request; an error of either is its outcome."""
    outcome = other[2] if one[2] in ("stop", "length") else one[2]
    tokens = one[3] + other[3], one[4] + other[4], one[5] + other[5]
    return one[0], one[1], outcome, *tokens, one[6], one[7]


class RequestContext(EndObserver):
    """The context of one HTTP request, shared by all calls that it makes."""

    __slots__ = (
        "address",
        "began_s",
        "calls",
        "context",
        "id",
        "key",
        "repeats",
        "traceparent",
        "warning",
    )

    def __init__(
        self, headers: Mapping[bytes, bytes], client: tuple[str, int] | None = None
    ) -> None:
        """Read the context from the headers, by lower-case name."""
        self.address = client[0] if client else ""  # a proxy's, perhaps
        self.traceparent = headers.get(TRACEPARENT, b"")
        self.repeats = False  # a refusal that passes is no answer: the gateway asks itself again
        self.warning = b""  # for the client, in a response header
        self.context: Any = None  # of the trace, once a call has begun one
        self.key = ""  # the name of its API key, where it is known before any call
        self.began_s = monotonic()
        self.calls: CallFacts | None = None  # of its calls that have ended
        id = headers.get(HEADER)
        self.id = _PREFIX % next(_numbers) if id is None or not _fit(id) else id

    def on_ended(self, call: InflightRequest, outcome: str, last: Delta | None) -> None:
        """Record the end of a call, for the request log."""
        before = self.calls
        route = call.route
        self.calls = (
            call.model[:_MOST_CHARS] if route is None else route.status.name,
            # without keys in the file `call.key` is what the client sent, perhaps a secret
            "" if call.caller is None else call.caller.rule.name,
            outcome,
            call.prompt_tokens,
            call.cached_tokens,
            call.answer_tokens if last is None else last.completion_tokens,
            call.started_s,
            call.first_s,
        )
        if before is not None:  # one of several choices or texts
            self.calls = _sum_calls(before, self.calls)

    @property
    def name(self) -> str:
        """Return the id as text."""
        return self.id.decode("ascii")

    @property
    def header(self) -> tuple[bytes, bytes]:
        return HEADER, self.id

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers: the id, and a warning if there is one."""
        return [self.header, (WARNING, self.warning)] if self.warning else [self.header]


#: Context of the current request, within its task or callback.
ORIGIN: ContextVar[RequestContext | None] = ContextVar("origin", default=None)
#: Whether the current request was taken before it had calls: see `Router.hold_incomplete`.
INCOMPLETE: ContextVar[bool] = ContextVar("incomplete", default=False)
#: Whether the current request is of a batch, and waits for all others.
BATCHED: ContextVar[bool] = ContextVar("batched", default=False)


def _of_line() -> str:
    origin = ORIGIN.get()
    return "" if origin is None else origin.name


logging_config.request_id = _of_line
