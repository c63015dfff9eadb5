"""The process that speaks with one MCP server, `python -m servekit.gateway.tool_servers.host`.

The `mcp` package is imported here and not in the gateway, which stays small; and whatever a server
sends, this process alone is slow, or runs out of memory. It ends with its gateway, and the server's
process with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, BinaryIO

import msgspec

from servekit.gateway.tool_servers.messages import (
    LENGTH_BYTES,
    MAX_RESULT_CHARS,
    MAX_TOOLS,
    Call,
    Cancel,
    Failed,
    FromHost,
    Ready,
    Result,
    ToHost,
    Tool,
    pack,
)
from servekit.protocol.access import McpServer
from servekit.system.orphan_cleanup import MARK
from servekit.system.parent_death import CHILD_MARK, die_with
from servekit.system.rlimits import cap_by_hard_limit

#: Environment variable by which the gateway finds all processes of one server.
TOOL_MARK = "SERVEKIT_TOOL_SERVER"
#: Memory of this process; a server that sends more ends it.
_MEMORY_BYTES = 2 * 2**30
_MAX_PAGES = 32
_MAX_SCHEMA_BYTES = 32 * 1024
_MAX_DESCRIPTION_CHARS = 4096
_MAX_REASON_CHARS = 500
#: The header that names a session. The answer to an unknown one is 404.
_SESSION = "mcp-session-id"
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Host:
    """A connected server: answers each call in a task of its own."""

    def __init__(
        self, client: Any, out: BinaryIO, session_lost: asyncio.Event | None = None
    ) -> None:
        """`session_lost` is set once the server has answered that it does not know the session."""
        self._client = client
        self._out = out
        self._session_lost = session_lost or asyncio.Event()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._lost = asyncio.Event()

    def send(self, message: FromHost) -> None:
        self._out.write(pack(message))
        self._out.flush()

    async def serve(self, commands: asyncio.StreamReader) -> None:
        """Answer calls until the gateway closes its end, or the connection is lost."""
        ends = [
            asyncio.create_task(self._take_commands(commands)),
            asyncio.create_task(self._lost.wait()),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ends, *self._calls.values()):
                task.cancel()

    async def _take_commands(self, commands: asyncio.StreamReader) -> None:
        while (message := await read_message(commands)) is not None:
            if isinstance(message, Cancel):
                if call := self._calls.get(message.id):
                    call.cancel()
            else:
                task = self._calls[message.id] = asyncio.create_task(self._call(message))
                task.add_done_callback(partial(self._forget, message.id))

    def _forget(self, id: int, _: asyncio.Task[None]) -> None:
        del self._calls[id]

    async def _call(self, call: Call) -> None:
        try:
            result = await self._client.call_tool(call.tool, call.arguments)
            text = cut(describe_content(result), MAX_RESULT_CHARS)
            self.send(Result(call.id, text, bool(result.is_error)))
        except Exception as error:
            if is_answer(error):
                lost = self._session_lost.is_set()
                self.send(Result(call.id, explain(error), is_error=True, lost=lost))
            else:  # such a connection does not come back; the gateway starts another host
                self.send(Failed(explain(error)))
                self._lost.set()


def describe_content(result: Any) -> str:
    """Return the text of a result; of images and other files only their kind."""
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        elif block.type == "resource" and hasattr(block.resource, "text"):
            parts.append(block.resource.text)
        else:
            kind = getattr(block, "mime_type", None) or block.type
            parts.append(f"[a part of the kind {str(kind)[:100]} is not shown]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def cut(text: str, most: int) -> str:
    """Return the text, cut with a note to the model if it is longer than `most` characters."""
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no text
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut: {len(text) - most} more characters]"


def is_answer(error: Exception) -> bool:
    """Return whether it is the server that answered with an error."""
    from mcp.shared.exceptions import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.code != CONNECTION_CLOSED


def explain(error: BaseException) -> str:
    """Return why the server failed, for people; of a group its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = str(error).strip() or type(error).__name__
    return cut(said, _MAX_REASON_CHARS)


async def list_tools(client: Any) -> Ready:
    """Return the tools that can be offered, and a sentence on each other one."""
    tools: dict[str, Tool] = {}
    left_out: list[str] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            if len(tools) >= MAX_TOOLS:
                left_out.append(f"it has more than {MAX_TOOLS} tools; the others are left out")
                return Ready(tuple(tools.values()), tuple(left_out[-MAX_TOOLS:]))
            if refusal := refuse_tool(tool.name, tool.input_schema, tools):
                left_out.append(f"{tool.name[:64]!r} {refusal}")
                continue
            about = cut(tool.description or "", _MAX_DESCRIPTION_CHARS)
            tools[tool.name] = Tool(tool.name, about, tool.input_schema)
        cursor = page.next_cursor
        if not cursor:
            break
    else:
        left_out.append(f"its list has more than {_MAX_PAGES} pages; the others are left out")
    return Ready(tuple(tools.values()), tuple(left_out[-MAX_TOOLS:]))


def refuse_tool(name: str, schema: Mapping[str, Any], known: Mapping[str, Tool]) -> str:
    """Return why a tool cannot be offered to a model; "" if it can."""
    if not _TOOL_NAME.fullmatch(name):
        return "is no name for a function: letters, digits and _ . - only, 64 at most"
    if name in known:
        return "is listed twice"
    try:
        size = len(msgspec.msgpack.encode(schema))
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError):
        return "has parameters that cannot be read"
    return f"has a schema of {size} bytes, too many" if size > _MAX_SCHEMA_BYTES else ""


async def read_message(commands: asyncio.StreamReader) -> ToHost | None:
    """Return the gateway's next message; None at its end."""
    try:
        length = int.from_bytes(await commands.readexactly(LENGTH_BYTES), "big")
        body = await commands.readexactly(length)
    except asyncio.IncompleteReadError:
        return None
    message: ToHost = msgspec.msgpack.decode(body, type=ToHost)
    return message


def make_client(address: McpServer, session_lost: asyncio.Event) -> Any:
    """Return a client of the server, not yet connected.

    `session_lost` is set once the server, perhaps a restarted one, does not know the session.
    """
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    if address.url:
        http = create_mcp_http_client(headers=dict(address.headers))

        async def find_loss(response: Any) -> None:
            if response.status_code == 404 and _SESSION in response.request.headers:
                session_lost.set()

        http.event_hooks = {**http.event_hooks, "response": [find_loss]}
        return Client(streamable_http_client(address.url, http_client=http))

    from servekit.gateway.tool_servers.stdio import open_stdio

    marks = {name: os.environ[name] for name in _MARKS if name in os.environ}
    return Client(open_stdio(address, marks))


#: Variables by which the supervisor and the gateway find what a dead process left.
_MARKS = (MARK, CHILD_MARK, TOOL_MARK)


async def answer_calls(out: BinaryIO) -> None:
    """Connect to the server that the gateway names, and answer its calls."""
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    length = int.from_bytes(await commands.readexactly(LENGTH_BYTES), "big")
    address = msgspec.msgpack.decode(await commands.readexactly(length), type=McpServer)
    try:
        session_lost = asyncio.Event()
        async with make_client(address, session_lost) as client:
            host = Host(client, out, session_lost)
            host.send(await list_tools(client))
            await host.serve(commands)
    except Exception as error:
        out.write(pack(Failed(explain(error))))
        out.flush()


def serve_tools(parent_pid: int) -> None:
    """Serve until the gateway closes stdin; what others print goes to the log."""
    die_with(parent_pid)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = cap_by_hard_limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(answer_calls(out))


if __name__ == "__main__":
    serve_tools(int(sys.argv[1]))
