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
from typing import Any

from servekit import logging_config

HEADER = b"x-request-id"
TRACEPARENT = b"traceparent"
#: Warning about a request that was answered nevertheless.
WARNING = b"servekit-warning"
#: Ids that are safe in a log, a header and a command line.
_fit = re.compile(rb"[A-Za-z0-9._:/=+@-]{1,128}").fullmatch
#: Prefix of generated ids, unique to this process.
_PREFIX = secrets.token_hex(6).encode() + b"-%06x"
_numbers = itertools.count(1)


class RequestContext:
    """The context of one HTTP request, shared by all calls that it makes."""

    __slots__ = ("address", "context", "id", "traceparent", "warning")

    def __init__(
        self, headers: Mapping[bytes, bytes], client: tuple[str, int] | None = None
    ) -> None:
        """Read the context from the headers, by lower-case name."""
        self.address = client[0] if client else ""  # a proxy's, perhaps
        self.traceparent = headers.get(TRACEPARENT, b"")
        self.warning = b""  # for the client, in a response header
        self.context: Any = None  # of the trace, once a call has begun one
        id = headers.get(HEADER)
        self.id = _PREFIX % next(_numbers) if id is None or not _fit(id) else id

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


def _of_line() -> str:
    origin = ORIGIN.get()
    return "" if origin is None else origin.name


logging_config.request_id = _of_line
