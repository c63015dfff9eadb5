"""A gateway's HTTP server around applications that a test makes up."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from servekit.gateway.http.limits import LIMITS, Limits
from servekit.gateway.http.response import FastHandler
from servekit.gateway.server import serving


@contextlib.asynccontextmanager
async def served(
    app: Any,
    hot: Mapping[bytes, FastHandler],
    max_body_bytes: int,
    limits: Limits = LIMITS,
    keep_alive_s: float = 75.0,
) -> AsyncIterator[int]:
    """The port."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    async with serving(app, listener, hot, max_body_bytes, limits, keep_alive_s=keep_alive_s):
        yield port
