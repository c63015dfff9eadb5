"""The process of an MCP server that speaks on its stdin and stdout, as a transport for `mcp`.

The package has a transport of its own, whose time grows with the square of a line's length and
whose memory nothing bounds: a result of 50 MB takes it minutes. Here a line has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from servekit.gateway.auth.api_key import Bucket
from servekit.protocol.access import McpServer
from servekit.system.python.python_command import module_command

MAX_LINE_BYTES = 8 * 2**20
#: What a server may write to the log at once, and again in each minute, bytes. The gateway writes
#: to the same pipe: a flood would hold it up, and push its own lines out of the log's files.
MAX_LOG_BYTES = 2**18
_PIECE_BYTES = 2**16
#: Time for the last of its stderr to arrive; a process that it has left may keep that open, s.
_LAST_ERRORS_S = 0.5
#: Time that a server has to end after its stdin was closed, before it is killed, s.
_END_S = 2.0


@asynccontextmanager
async def open_stdio(
    address: McpServer, marks: Mapping[str, str]
) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server, and yield the streams of its messages; at the end it is gone.

    It gets the variables of `address` and `marks`, and of ours HOME, PATH and the like. Raises
    OSError if it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *module_command("servekit.gateway.tool_servers.exec_with_parent"),
        str(os.getpid()),
        *address.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**get_default_environment(), **address.env, **marks},
        cwd=address.cwd or None,
        limit=MAX_LINE_BYTES,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(_copy_errors(process.stderr, address.name))
    into, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, out = anyio.create_memory_object_stream[SessionMessage](0)
    pumps = (
        asyncio.create_task(_read_lines(process.stdout, into)),
        asyncio.create_task(_write_lines(process.stdin, out)),
    )
    try:
        yield read, write
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for stream in (into, read, write, out):
            stream.close()
        await _end(process)
        await asyncio.wait([errors], timeout=_LAST_ERRORS_S)
        errors.cancel()


async def _copy_errors(source: asyncio.StreamReader, name: str) -> None:
    """Copy a server's stderr to ours, up to MAX_LOG_BYTES; what is more is read and counted."""
    bucket = Bucket(MAX_LOG_BYTES, time.monotonic())
    left_out = 0
    while piece := await source.read(_PIECE_BYTES):
        now = time.monotonic()
        if bucket.level(now) < len(piece):
            left_out += len(piece)
            continue
        text = _tell_left_out(left_out, name) + piece
        bucket.withdraw(len(text), now)
        os.write(2, text)
        left_out = 0
    os.write(2, _tell_left_out(left_out, name))


def _tell_left_out(size_bytes: int, name: str) -> bytes:
    if not size_bytes:
        return b""
    return f"\n[{size_bytes} bytes of the stderr of MCP server {name!r} are left out]\n".encode()


async def _read_lines(source: asyncio.StreamReader, into: Any) -> None:
    """Deliver each line as a message; what is none is an error that the session passes over."""
    # the end of `into` tells the session that the connection is closed; so does too long a line
    with into, contextlib.suppress(ValueError, anyio.BrokenResourceError):
        while line := await source.readline():
            try:
                message = SessionMessage(jsonrpc_message_adapter.validate_json(line))
            except ValueError as error:
                await into.send(error)
            else:
                await into.send(message)


async def _write_lines(sink: asyncio.StreamWriter, out: Any) -> None:
    with contextlib.suppress(OSError):  # the reader notices its end
        async for item in out:
            text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
            sink.write(text.encode() + b"\n")
            await sink.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
