"""A server's process: what it gets, what is read of it, and that it is gone at the end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from servekit.protocol.access import McpServer
from tests.polling import poll_async

pytest.importorskip("mcp")
import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from servekit.gateway.tool_servers import stdio
from servekit.gateway.tool_servers.stdio import MAX_LOG_BYTES, open_stdio

PING = '{"jsonrpc":"2.0","id":1,"method":"ping"}'
PONG = '{"jsonrpc":"2.0","id":2,"result":{}}'


def address(*command: str, **more: Any) -> McpServer:
    return McpServer("odd", command, **more)


def shell(script: str, **more: Any) -> McpServer:
    return address("/bin/sh", "-c", script, **more)


def message(text: str) -> SessionMessage:
    return SessionMessage(jsonrpc_message_adapter.validate_json(text))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with others, an end in order takes longer."""
    monkeypatch.setattr(stdio, "_END_S", 30.0)
    monkeypatch.setattr(stdio, "_LAST_ERRORS_S", 30.0)


async def read_all(server: McpServer, **marks: str) -> list[Any]:
    """Return all that a server says until it ends."""
    async with asyncio.timeout(30), open_stdio(server, marks) as (read, _):
        return [one async for one in read]


def texts_of(said: Sequence[Any]) -> list[str]:
    return [one.message.model_dump_json(by_alias=True, exclude_unset=True) for one in said]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_a_message_is_a_line_both_ways() -> None:
    async with asyncio.timeout(30), open_stdio(address("cat"), {}) as (read, write):
        await write.send(message(PING))
        await write.send(message(PONG))
        back = [await read.receive(), await read.receive()]
    assert texts_of(back) == [PING, PONG]


async def test_a_line_that_is_no_message_is_an_error_and_the_next_one_is_read() -> None:
    said = await read_all(shell(f"echo rubbish; echo '{{}}'; echo '{PING}'"))
    assert [isinstance(one, ValueError) for one in said] == [True, True, False]
    assert texts_of(said[2:]) == [PING]


async def test_it_gets_its_variables_the_marks_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_GATEWAY", "x")
    script = 'echo "$TOKEN,$MARK,$SECRET_OF_THE_GATEWAY,$(pwd),$PATH" > told'
    await read_all(shell(script, env={"TOKEN": "t"}, cwd=str(tmp_path)), MARK="m")
    told = (tmp_path / "told").read_text().strip()
    assert told == f"t,m,,{tmp_path},{os.environ['PATH']}"


async def test_a_mark_cannot_be_overridden_by_the_file(tmp_path: Path) -> None:
    await read_all(shell("echo $MARK > told", env={"MARK": "mine"}, cwd=str(tmp_path)), MARK="m")
    assert (tmp_path / "told").read_text() == "m\n"


async def test_it_leads_a_session_of_its_own_so_that_all_of_it_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "_END_S", 0.02)
    script = "sleep 3600 & echo $! > child; exec cat"
    async with open_stdio(shell(script, cwd=str(tmp_path)), {}) as (read, write):
        await write.send(message(PING))
        await read.receive()
        child = int((tmp_path / "child").read_text())
        assert os.getsid(child) != os.getsid(0)
    await poll_async("the child is gone", lambda: is_gone(child))


async def test_a_server_that_goes_on_after_its_stdin_is_closed_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stdio, "_END_S", 0.02)
    script = f"echo $$ > pid; echo '{PING}'; exec sleep 3600"
    async with open_stdio(shell(script, cwd=str(tmp_path)), {}) as (read, _):
        await read.receive()
    pid = int((tmp_path / "pid").read_text())
    await poll_async("the server is gone", lambda: is_gone(pid))


async def test_a_server_may_end_in_its_own_time_after_its_stdin_is_closed(tmp_path: Path) -> None:
    script = f"echo '{PING}'; cat > /dev/null; echo done > last"
    async with open_stdio(shell(script, cwd=str(tmp_path)), {}) as (read, _):
        await read.receive()
    assert (tmp_path / "last").read_text() == "done\n"


async def test_messages_to_a_server_that_has_ended_are_dropped() -> None:
    async with asyncio.timeout(30), open_stdio(address("true"), {}) as (read, write):
        with pytest.raises(anyio.EndOfStream):
            await read.receive()
        await write.send(message(PING))


async def test_its_stderr_is_copied_up_to_a_limit(capfd: pytest.CaptureFixture[str]) -> None:
    noise = f"{sys.executable} -c \"print('x' * {2 * MAX_LOG_BYTES})\" >&2"
    await read_all(shell(f"echo first >&2; {noise}"))
    logged = capfd.readouterr().err
    assert logged.startswith("first\n")
    assert "bytes of the stderr of MCP server 'odd' are left out]" in logged
    assert len(logged) < MAX_LOG_BYTES + 200


async def test_all_of_a_short_stderr_is_copied_without_a_note(
    capfd: pytest.CaptureFixture[str],
) -> None:
    await read_all(shell("echo first >&2; echo last >&2"))
    assert capfd.readouterr().err == "first\nlast\n"
