"""An MCP server as the gateway sees it: started when first used, ended when idle.

Each has a host process (`tool_servers.host`), so that nothing that a server does is done on the
gateway's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from servekit.gateway.tool_servers.host import TOOL_MARK
from servekit.gateway.tool_servers.messages import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    Call,
    Cancel,
    Failed,
    FromHost,
    Ready,
    Result,
    pack,
)
from servekit.protocol.access import McpServer
from servekit.system.orphan_cleanup import kill_marked
from servekit.system.python.python_command import module_command

#: Time that a host has to end its server in the orderly way before both are killed, s.
_END_S = 5.0
_MOST_WAIT_S = 60.0
_KILL_ROUNDS = 100
_MAX_ARGUMENT_BYTES = 2**20
_ENDED = "it ended"


class ToolServerError(Exception):
    """A server that cannot be used; the text says why, and ends a sentence."""


@dataclass(slots=True, eq=False)
class _Host:
    """A running host process, and the calls that wait for it."""

    process: asyncio.subprocess.Process
    mark: str
    ready: asyncio.Future[Ready]
    calls: dict[int, asyncio.Future[Result]] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None


class ToolServer:
    """One server. Use it on one event loop.

    After a failure it is not started for `retry_s`, doubled by each further failure.
    """

    def __init__(self, server: McpServer, retry_s: float = 1.0) -> None:
        self.server = server
        self._retry_s = retry_s
        self._closed = False
        self._host: _Host | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count(1)
        self._failures = 0
        self._retry_at_s = 0.0
        self._reason = ""
        self._idle: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def list_tools(self) -> Ready:
        """Return the server's tools; start it if it does not run. Raises ToolServerError."""
        return (await self._connect()).ready.result()

    async def call_tool(self, tool: str, arguments: Mapping[str, Any]) -> Result:
        """Return what a tool answers; `is_error` says that the tool itself failed.

        A call that is cancelled, or takes too long, is given up at the server as well. One that a
        restarted server did not take is sent again, once. Raises ToolServerError if the server
        cannot be reached, ends, or takes too long.
        """
        try:
            size_bytes = len(msgspec.msgpack.encode(arguments))
        except OverflowError:
            raise ToolServerError("the arguments have a number of more than 64 bits") from None
        if size_bytes > _MAX_ARGUMENT_BYTES:
            raise ToolServerError(f"the arguments are larger than {_MAX_ARGUMENT_BYTES} bytes")
        result = await self._call_once(tool, arguments)
        return await self._call_once(tool, arguments) if result.lost else result

    async def _call_once(self, tool: str, arguments: Mapping[str, Any]) -> Result:
        host = await self._connect()
        if all(tool != one.name for one in host.ready.result().tools):
            raise ToolServerError(f"it has no tool {tool[:64]!r}")
        id = next(self._ids)
        future = host.calls[id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self.server.call_timeout_s):
                self._send(host, Call(id, tool, dict(arguments)))
                result: Result = await future
            if result.lost:
                self._drop(host)
            return result
        except TimeoutError:
            # the server may hang for good: the next call gets a new one
            self._drop(host)
            reason = f"the call took more than {self.server.call_timeout_s:g} s"
            raise ToolServerError(reason) from None
        finally:
            del host.calls[id]
            if not future.done() or future.cancelled():
                self._send(host, Cancel(id))
            self._wait_idle()
            if host is not self._host and not host.calls:
                self._end_later(host)

    def retries_in_s(self) -> float:
        """Return after how long a failed server may be started again, s; 0 or less is now."""
        return self._retry_at_s - time.monotonic()

    def close(self) -> Coroutine[Any, Any, None]:
        """Refuse calls from now on; what is returned ends the server and waits for that."""
        self._closed = True
        return self._end_all()

    async def _end_all(self) -> None:
        async with self._starting:
            if self._idle is not None:
                self._idle.cancel()
            if host := self._host:
                self._drop(host)
                self._end_later(host)
        await asyncio.gather(*self._ending)

    # ---- its processes

    async def _connect(self) -> _Host:
        async with self._starting:
            if self._closed:
                raise ToolServerError("it is no longer offered")
            if self._host is None:
                if (wait_s := self.retries_in_s()) > 0:
                    said = f"{self._reason}; it is tried again in {wait_s:.0f} s"
                    raise ToolServerError(said)
                self._host = await self._start()
            self._wait_idle()
            return self._host

    async def _start(self) -> _Host:
        host = await self._spawn()
        try:
            async with asyncio.timeout(self.server.start_timeout_s):
                await asyncio.shield(host.ready)
        except BaseException as error:
            self._end_later(host, at_once=True)
            if isinstance(error, TimeoutError):
                error = ToolServerError(
                    f"it did not start within {self.server.start_timeout_s:g} s"
                )
            if isinstance(error, ToolServerError):
                self._note_failure(str(error))
            raise error from None
        return host

    async def _spawn(self) -> _Host:
        mark = secrets.token_hex(16)
        try:
            process = await asyncio.create_subprocess_exec(
                *module_command("servekit.gateway.tool_servers.host"),
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, TOOL_MARK: mark},
                start_new_session=True,
            )
        except OSError as error:
            raise ToolServerError(f"no process can be started: {error.strerror}") from None
        host = _Host(process, mark, asyncio.get_running_loop().create_future())
        self._send(host, self.server)
        host.reading = asyncio.create_task(self._read(host))
        return host

    def _send(self, host: _Host, message: msgspec.Struct) -> None:
        assert host.process.stdin is not None
        if not host.process.stdin.is_closing():
            host.process.stdin.write(pack(message))

    async def _read(self, host: _Host) -> None:
        """Deliver what the host says until it ends, then fail the calls that still wait."""
        reason = _ENDED
        try:
            while True:
                message = await self._read_message(host)
                if isinstance(message, Failed):
                    reason = message.reason
                elif isinstance(message, Ready) and not host.ready.done():
                    host.ready.set_result(message)
                elif isinstance(message, Result):
                    waiting = host.calls.get(message.id)
                    if waiting is not None and not waiting.done():
                        self._failures = 0
                        waiting.set_result(message)
        except (asyncio.IncompleteReadError, msgspec.MsgspecError, RecursionError, OSError):
            pass
        finally:
            waiting_ones: list[asyncio.Future[Any]] = [host.ready, *host.calls.values()]
            for future in waiting_ones:
                if not future.done():
                    future.set_exception(ToolServerError(reason))
                    future.exception()  # nobody may wait for it any more
            if host is self._host:
                self._drop(host)
                self._note_failure(reason)
                self._end_later(host, at_once=True)

    async def _read_message(self, host: _Host) -> FromHost:
        assert host.process.stdout is not None
        length = int.from_bytes(await host.process.stdout.readexactly(LENGTH_BYTES), "big")
        if length > MAX_MESSAGE_BYTES:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        body = await host.process.stdout.readexactly(length)
        message: FromHost = msgspec.msgpack.decode(body, type=FromHost)
        return message

    def _note_failure(self, reason: str) -> None:
        self._reason = reason
        wait_s = min(_MOST_WAIT_S, self._retry_s * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        self._retry_at_s = time.monotonic() + wait_s

    def _wait_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self.server.idle_s, self._end_idle)

    def _end_idle(self) -> None:
        if (host := self._host) and not host.calls:
            self._drop(host)
            self._end_later(host)

    def _drop(self, host: _Host) -> None:
        """Send no more calls to a host."""
        if host is self._host:
            self._host = None

    def _end_later(self, host: _Host, *, at_once: bool = False) -> None:
        task = asyncio.create_task(_end(host, 0.0 if at_once else _END_S))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def _end(host: _Host, within_s: float) -> None:
    """End a host in the orderly way, if it has time; then kill all that is left of it."""
    assert host.process.stdin is not None
    host.process.stdin.close()
    if within_s:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await host.process.wait()
    if host.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.process.pid, signal.SIGKILL)
    await host.process.wait()
    for _ in range(_KILL_ROUNDS):  # what was forked during a round is found in the next
        if not await asyncio.to_thread(kill_marked, TOOL_MARK, host.mark):
            break
    if host.reading is not None:
        await asyncio.wait([host.reading])
