"""Where a request comes from: the id that it is known by, and the trace that it is part of.

An id is the client's own, `X-Request-Id`, where that is fit to be written down, else a new one. It
is in the answer's header, goes to the worker with the request, and is in every line of the log
that is about it.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from servekit import logging_config

Headers = Sequence[tuple[bytes, bytes]]

HEADER = b"x-request-id"
TRACEPARENT = b"traceparent"
#: What a client would want to know of its request although it was answered.
WARNING = b"servekit-warning"
#: What a log, a header and a command line can hold without harm.
_fit = re.compile(rb"[A-Za-z0-9._:/=+@-]{1,128}").fullmatch
#: Of this process, and so of this gateway's life.
_PREFIX = secrets.token_hex(6).encode() + b"-%06x"
_numbers = itertools.count(1)


class RequestContext:
    """One HTTP request, whatever calls it makes."""

    __slots__ = ("address", "context", "id", "traceparent", "warning")

    def __init__(self, headers: Headers, client: tuple[str, int] | None = None) -> None:
        self.address = client[0] if client else ""  # as far as the gateway knows: a proxy's, maybe
        self.id = self.traceparent = b""
        self.warning = b""  # for the client, in a header of the answer
        self.context: Any = None  # of its trace, once a call of it has begun one
        for name, value in headers:
            if name == HEADER:
                self.id = value if _fit(value) else b""
            elif name == TRACEPARENT:
                self.traceparent = value
        if not self.id:
            self.id = _PREFIX % next(_numbers)

    @property
    def name(self) -> str:
        """The id as text."""
        return self.id.decode("ascii")

    @property
    def header(self) -> tuple[bytes, bytes]:
        return HEADER, self.id

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those of its answer: its id, and what its client would want to know."""
        return [self.header, (WARNING, self.warning)] if self.warning else [self.header]


#: Of the request that is being taken, in its own task or callback.
ORIGIN: ContextVar[RequestContext | None] = ContextVar("origin", default=None)


def _of_line() -> str:
    origin = ORIGIN.get()
    return "" if origin is None else origin.name


logging_config.request_id = _of_line
