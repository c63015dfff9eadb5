"""MCP servers, real ones: sane, slow, crashing and hostile, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from servekit.gateway.tool_servers.messages import (
    MAX_RESULT_CHARS,
    MAX_TOOLS,
    Result,
)
from servekit.gateway.tool_servers.server import ToolServer, ToolServerError
from servekit.gateway.tool_servers.stdio import MAX_LOG_BYTES
from servekit.protocol.access import McpServer
from tests.polling import poll, poll_async

pytest.importorskip("mcp")
ODD = str(Path(__file__).with_name("odd_tools.py"))
#: A server in plain Python that speaks the protocol by hand, for what the package would not send.
BY_HAND = """
import json, sys
def answer(id, result):
    print(json.dumps({{"jsonrpc": "2.0", "id": id, "result": result}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    id, method = asked.get("id"), asked.get("method")
    if method == "initialize":
        answer(id, {{"protocolVersion": "2025-06-18", "capabilities": {{"tools": {{}}}},
                    "serverInfo": {{"name": "x", "version": "1"}}}})
    elif method == "tools/list":
        {listing}
    elif id is not None:
        print(json.dumps({{"jsonrpc": "2.0", "id": id,
                          "error": {{"code": -32601, "message": "unknown"}}}}), flush=True)
"""
Open = Callable[..., ToolServer]
#: Of the tests that share a server, which is used on one loop.
on_one_loop = pytest.mark.asyncio(loop_scope="module")


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest_asyncio.fixture
async def open_server(tmp_path: Path) -> AsyncIterator[Open]:
    opened = []

    def make(*command: str, retry_s: float = 1.0, **more: Any) -> ToolServer:
        words = command or (sys.executable, ODD, str(tmp_path / "pid"))
        opened.append(ToolServer(McpServer("odd", words, **more), retry_s))
        return opened[-1]

    yield make
    await asyncio.gather(*(server.close() for server in opened))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ToolServer]:
    """A server for all tests that leave it as it was: it takes two seconds of CPU to start."""
    folder = tmp_path_factory.mktemp("shared")
    server = ToolServer(McpServer("odd", (sys.executable, ODD, str(folder / "pid"))))
    yield server
    await server.close()


@pytest.fixture
def pid(tmp_path: Path) -> Callable[[], int]:
    return lambda: int((tmp_path / "pid").read_text())


@on_one_loop
async def test_a_tool_is_listed_and_called(server: ToolServer) -> None:
    listed = await server.list_tools()
    add = next(tool for tool in listed.tools if tool.name == "add")
    assert add.description == "Add two numbers." and set(add.parameters["properties"]) == {"a", "b"}
    assert any("a name with spaces" in one for one in listed.left_out)
    results = await asyncio.gather(*(server.call_tool("add", {"a": i, "b": 1}) for i in range(20)))
    assert [one.text for one in results] == [str(i + 1) for i in range(20)]


@on_one_loop
async def test_a_tools_error_is_a_result(server: ToolServer) -> None:
    result = await server.call_tool("fail", {})
    assert result.is_error and "no such city" in result.text


@on_one_loop
async def test_an_unknown_tool_is_not_sent(server: ToolServer) -> None:
    with pytest.raises(ToolServerError, match="no tool"):
        await server.call_tool("rm", {})


@on_one_loop
async def test_a_long_result_is_cut(server: ToolServer) -> None:
    text = (await server.call_tool("fill", {"count": 2**20})).text
    assert len(text) < MAX_RESULT_CHARS + 100 and "cut" in text


async def test_a_huge_result_ends_the_call_and_not_the_loop(open_server: Open) -> None:
    server = open_server()
    await server.list_tools()
    call = asyncio.create_task(server.call_tool("fill", {"count": 50 * 2**20}))
    longest_s, before_s = 0.0, time.monotonic()
    while not call.done():
        await asyncio.sleep(0)
        longest_s, before_s = max(longest_s, time.monotonic() - before_s), time.monotonic()
    assert longest_s < 1  # 50 MB would take the gateway longer to read and to parse
    with pytest.raises(ToolServerError, match="closed"):
        call.result()


@on_one_loop
async def test_rubbish_between_messages_is_passed_over(server: ToolServer) -> None:
    assert (await server.call_tool("print_rubbish", {})).text == "printed"
    assert (await server.call_tool("add", {"a": 1, "b": 1})).text == "2"


async def test_much_on_its_stderr_is_left_out_of_the_log(
    open_server: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    server = open_server()
    assert (await server.call_tool("flood", {"count": 10})).text == "flooded"
    assert (await server.call_tool("flood", {"count": 1_000_000})).text == "flooded"
    await server.close()
    logged = capfd.readouterr().err
    assert "line 9\n" in logged and "of the stderr of MCP server 'odd' are left out" in logged
    assert len(logged) < 2 * MAX_LOG_BYTES  # of 11 MB, on a slow machine too


async def test_the_last_words_of_a_server_are_logged(
    open_server: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ToolServerError):
        await open_server(sys.executable, "-c", "raise SystemExit('no notes here')").list_tools()
    await poll_async("its last words", lambda: "no notes here" in capfd.readouterr().err)


async def test_a_crash_fails_the_call_and_the_next_one_waits(open_server: Open) -> None:
    server = open_server(retry_s=0.5)
    await server.list_tools()
    with pytest.raises(ToolServerError):
        await server.call_tool("crash", {})
    with pytest.raises(ToolServerError, match="tried again"):
        await server.list_tools()

    await poll_async("its time has come", lambda: server.retries_in_s() <= 0)
    assert (await server.call_tool("add", {"a": 1, "b": 1})).text == "2"


async def test_a_call_that_hangs_ends_with_its_server(
    open_server: Open, pid: Callable[[], int], tmp_path: Path
) -> None:
    server = open_server(call_timeout_s=1)
    await server.list_tools()
    first = pid()
    with pytest.raises(ToolServerError, match="more than 1 s"):
        await server.call_tool("hang", {"begun": str(tmp_path / "begun")})
    await poll_async("the hanging server is gone", lambda: is_gone(first))
    assert (await server.call_tool("add", {"a": 1, "b": 1})).text == "2"


async def test_a_cancelled_call_leaves_the_server(
    open_server: Open, pid: Callable[[], int], tmp_path: Path
) -> None:
    server = open_server()
    call = await begin_to_hang(server, tmp_path / "begun")
    call.cancel()
    await asyncio.wait([call])
    first = pid()
    assert (await server.call_tool("add", {"a": 2, "b": 1})).text == "3"
    assert pid() == first


async def begin_to_hang(server: ToolServer, begun: Path) -> asyncio.Task[Result]:
    """Return a call that its server has begun, and never answers."""
    call = asyncio.create_task(server.call_tool("hang", {"begun": str(begun)}))
    await poll_async("the call has reached its server", begun.exists)
    return call


async def test_a_server_that_is_killed_during_a_call(
    open_server: Open, pid: Callable[[], int], tmp_path: Path
) -> None:
    call = await begin_to_hang(open_server(), tmp_path / "begun")
    os.kill(pid(), signal.SIGKILL)
    with pytest.raises(ToolServerError):
        await asyncio.wait_for(call, 20)


async def test_an_idle_server_is_ended(open_server: Open, pid: Callable[[], int]) -> None:
    server = open_server(idle_s=0.3)
    await server.list_tools()
    await poll_async("the idle server is gone", lambda: is_gone(pid()))
    assert (await server.call_tool("add", {"a": 1, "b": 1})).text == "2"


async def test_what_a_server_has_detached_ends_with_it(open_server: Open) -> None:
    server = open_server()
    detached = int((await server.call_tool("detach", {})).text)
    assert not is_gone(detached)
    await server.close()
    assert is_gone(detached)


async def test_an_address_without_a_server_says_so() -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        server = ToolServer(McpServer("x", url=f"http://127.0.0.1:{taken.getsockname()[1]}/"))
        with pytest.raises(ToolServerError, match="connect"):
            await server.list_tools()
    await server.close()


async def test_a_program_that_ends_at_once_says_so(open_server: Open) -> None:
    with pytest.raises(ToolServerError):
        await open_server("true").list_tools()


async def test_an_unknown_command_says_so(open_server: Open) -> None:
    with pytest.raises(ToolServerError):
        await open_server("/no/such/program").list_tools()


async def test_a_silent_server_is_given_up(open_server: Open) -> None:
    silent = open_server("sleep", "3600", start_timeout_s=2)
    with pytest.raises(ToolServerError, match="did not start within 2 s"):
        await silent.list_tools()


async def test_it_gets_its_own_environment_only(
    open_server: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_GATEWAY", "x")
    server = open_server(env={"TOKEN": "t"})
    assert (await server.call_tool("tell_environment", {"name": "TOKEN"})).text == "t"
    secret = await server.call_tool("tell_environment", {"name": "SECRET_OF_THE_GATEWAY"})
    assert secret.text == "unset"


async def test_an_endless_list_is_cut(open_server: Open) -> None:
    listing = 'answer(id, {"tools": [], "nextCursor": "more"})'
    listed = await open_server(sys.executable, "-c", BY_HAND.format(listing=listing)).list_tools()
    assert any("pages" in one for one in listed.left_out)


async def test_a_thousand_tools_and_huge_schemas_are_left_out(open_server: Open) -> None:
    listing = (
        'answer(id, {"tools": [{"name": "big", "inputSchema": {"type": "object", "x": "y" * 99999}}'
        '] + [{"name": f"t{i}", "inputSchema": {"type": "object"}} for i in range(1000)]})'
    )
    listed = await open_server(sys.executable, "-c", BY_HAND.format(listing=listing)).list_tools()
    assert len(listed.tools) == MAX_TOOLS
    assert any("big" in one for one in listed.left_out)


async def test_a_tool_with_a_number_that_no_message_carries_is_left_out(open_server: Open) -> None:
    """JSON has integers of any size."""
    listing = (
        'answer(id, {"tools": [{"name": name, "inputSchema": {"type": "object", "maximum": most}}'
        ' for name, most in (("sane", 1), ("vast", 10**30))]})'
    )
    listed = await open_server(sys.executable, "-c", BY_HAND.format(listing=listing)).list_tools()
    assert [tool.name for tool in listed.tools] == ["sane"]
    assert listed.left_out == ("'vast' has parameters that cannot be read",)


@on_one_loop
async def test_a_call_with_a_number_that_no_message_carries_fails(server: ToolServer) -> None:
    with pytest.raises(ToolServerError, match="a number of more than 64 bits"):
        await server.call_tool("add", {"a": 10**30, "b": 1})
    assert (await server.call_tool("add", {"a": 1, "b": 1})).text == "2"


@pytest.fixture
def http_port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, ODD, "http", str(port)])

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        poll("the HTTP server listens", answers)
        yield port
    finally:
        process.kill()
        process.wait()


async def test_a_server_over_http(open_server: Open, http_port: int) -> None:
    address = McpServer("http", url=f"http://127.0.0.1:{http_port}/mcp")
    server = ToolServer(address)
    try:
        assert (await server.call_tool("add", {"a": 1, "b": 1})).text == "2"
    finally:
        await server.close()


class WithSessions(BaseHTTPRequestHandler):
    """An MCP server over HTTP that answers to the sessions that it has begun, and counts calls."""

    sessions: ClassVar[set[str]] = set()
    calls: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        id, method, session = asked.get("id"), asked["method"], self.headers["mcp-session-id"]
        result: dict[str, Any] = {"tools": [{"name": "count", "inputSchema": {"type": "object"}}]}
        if method == "initialize":
            session = f"session-{len(self.calls)}"
            self.sessions.add(session)
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
            result["serverInfo"] = {"name": "x", "version": "1"}
        elif session not in self.sessions:
            error = {"code": -32600, "message": "no such session"}
            self._answer(404 if session else 400, session, {"id": id, "error": error})
            return
        elif method == "tools/call":
            self.calls.append(session)
            result = {"content": [{"type": "text", "text": str(len(self.calls))}]}
        self._answer(202 if id is None else 200, session, {"id": id, "result": result})

    def do_DELETE(self) -> None:
        self._answer(200, "", {})

    def _answer(self, status: int, session: str | None, told: dict[str, Any]) -> None:
        body = b"" if status == 202 else json.dumps({"jsonrpc": "2.0", **told}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("mcp-session-id", session or "")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


async def test_a_server_that_has_forgotten_the_session_gets_another() -> None:
    """As one does that was restarted; the call that finds it out is sent again."""
    listener = ThreadingHTTPServer(("127.0.0.1", 0), WithSessions)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    server = ToolServer(McpServer("http", url=f"http://127.0.0.1:{listener.server_port}/mcp"))
    try:
        assert (await server.call_tool("count", {})).text == "1"
        WithSessions.sessions.clear()
        assert (await server.call_tool("count", {})).text == "2"
        assert (await server.call_tool("count", {})).text == "3"
        assert WithSessions.calls == ["session-0", "session-1", "session-1"]
    finally:
        await server.close()
        listener.shutdown()
        listener.server_close()


def test_all_die_with_the_gateway(tmp_path: Path) -> None:
    """A process that stands for the gateway is killed during a call."""
    code = f"""
import asyncio, sys
from servekit.gateway.tool_servers.server import ToolServer
from servekit.protocol.access import McpServer
async def main():
    command = (sys.executable, {ODD!r}, {str(tmp_path / "pid")!r})
    server = ToolServer(McpServer("odd", command))
    await server.list_tools()
    assert "mcp" not in sys.modules
    print(server._host.process.pid, flush=True)
    await server.call_tool("hang", {{"begun": {str(tmp_path / "begun")!r}}})
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]
    ) as gateway:
        assert gateway.stdout is not None
        host = int(gateway.stdout.readline())
        poll("the call has reached its server", (tmp_path / "begun").exists)
        gateway.kill()
    pid = int((tmp_path / "pid").read_text())
    poll("the host and the server are gone", lambda: is_gone(host) and is_gone(pid))
