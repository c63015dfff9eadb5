"""Which MCP servers a caller may use, how their tools are named, and what ends a server.

No server is started here: `test_server.py` has real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from servekit.errors import RequestError
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.auth.authorization import Access
from servekit.gateway.tool_servers import registry
from servekit.gateway.tool_servers.messages import MAX_TOOLS, Ready, Result, Tool
from servekit.gateway.tool_servers.registry import (
    OfferedTool,
    ToolServers,
    can_start_servers,
    may_use_tools,
    name_tools,
)
from servekit.gateway.tool_servers.server import ToolServer, ToolServerError
from servekit.protocol.access import AccessRules, KeyRule, McpServer

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
PLAIN = ApiKey(KeyRule("plain"), 0.0)
TOOLS = ApiKey(KeyRule("tools", tools=True), 0.0)
ADMIN = ApiKey(KeyRule("admin", admin=True), 0.0)
URL = "https://tools.example/mcp"


class Told(ToolServer):
    """A server without a process, which has as many tools as its variable COUNT says."""

    closed = False

    async def list_tools(self) -> Ready:
        if "BROKEN" in self.server.env:
            raise ToolServerError("it ended")
        count = int(self.server.env.get("COUNT", "1"))
        return Ready(tuple(Tool(f"t{number}", "about", SCHEMA) for number in range(count)))

    async def call_tool(self, tool: str, arguments: Mapping[str, Any]) -> Result:
        if "BROKEN" in self.server.env:
            raise ToolServerError("it ended")
        return Result(1, f"{self.server.name} {tool} {dict(arguments)}")

    def close(self) -> Any:
        self.closed = True
        return super().close()


def server(name: str, **env: str) -> McpServer:
    return McpServer(name, ("program",), env)


def rules(*servers: McpServer) -> AccessRules:
    return AccessRules(mcp=servers)


@pytest.fixture
def access() -> Access:
    return Access()


@pytest.fixture
async def servers(access: Access, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ToolServers]:
    monkeypatch.setattr(registry, "ToolServer", Told)
    access.apply_rules(rules(server("one"), server("two")))
    made = ToolServers(access)
    yield made
    await made.close()


async def find(servers: ToolServers, name: str) -> ToolServer:
    offer = await servers.open_tools([name], ADMIN)
    return next(iter(offer.tools.values())).server


# ---------------------------------------------------------------- who may use them


def test_tools_are_for_keys_that_may_use_them_and_for_administrators() -> None:
    assert [may_use_tools(one) for one in (None, PLAIN, TOOLS, ADMIN)] == [False, False, True, True]


async def test_only_who_may_use_servers_is_told_their_names(servers: ToolServers) -> None:
    assert servers.list_names(TOOLS) == servers.list_names(ADMIN) == ("one", "two")
    assert servers.list_names(PLAIN) == servers.list_names(None) == ()


@pytest.mark.parametrize(
    ("name", "caller", "reason"),
    [
        ("one", None, "this needs a key with `tools: true`"),
        ("one", PLAIN, "this needs a key with `tools: true`"),
        (URL, PLAIN, "this needs a key with `tools: true`"),
        ("three", TOOLS, "there is no such server any more"),
        (URL, TOOLS, "a server by its address needs a key with `admin: true`"),
        ("ftp://tools.example/", ADMIN, "its address must be an address such as https://"),
        ("https://me:secret@tools.example/", ADMIN, "its address has a user's name or password"),
    ],
)
async def test_why_a_server_cannot_be_used(
    servers: ToolServers, name: str, caller: ApiKey | None, reason: str
) -> None:
    [found] = (await servers.list_tools([name], caller)).values()
    assert isinstance(found, str) and reason in found
    with pytest.raises(RequestError) as refused:
        await servers.open_tools([name], caller)
    assert refused.value.message == f"the tools of {name} cannot be used: {found}"


async def test_each_server_is_listed_once_beside_the_reasons_of_others(
    servers: ToolServers, access: Access
) -> None:
    access.apply_rules(rules(server("one"), server("bad", BROKEN="1")))
    found = await servers.list_tools(["bad", "one", "three", "one"], TOOLS)
    assert list(found) == ["bad", "one", "three"]
    assert found["bad"] == "it ended"
    assert found["one"] == Ready((Tool("t0", "about", SCHEMA),))


# ---------------------------------------------------------------- an offer


async def test_an_offer_defines_its_tools_and_calls_them(servers: ToolServers) -> None:
    offer = await servers.open_tools(["two"], TOOLS)
    function = {"name": "t0", "description": "about", "parameters": SCHEMA}
    assert offer.define() == [{"type": "function", "function": function}]
    assert offer.key == "tools"
    result = await offer.call(offer.tools["t0"], {"at": 3})
    assert result == Result(1, "two t0 {'at': 3}")


@pytest.mark.parametrize(
    ("before", "then", "name", "may"),
    [
        (KeyRule("k", tools=True), KeyRule("k"), "one", False),
        (KeyRule("k", admin=True), KeyRule("k", tools=True), "one", True),
        (KeyRule("k", admin=True), KeyRule("k", tools=True), URL, False),
    ],
)
async def test_a_right_that_is_withdrawn_ends_with_the_call_under_way(
    servers: ToolServers, before: KeyRule, then: KeyRule, name: str, may: bool
) -> None:
    caller = ApiKey(before, 0.0)
    offer = await servers.open_tools([name], caller)
    assert not (await offer.call(offer.tools["t0"], {})).is_error
    caller.set_rule(then, 0.0)
    assert (await offer.call(offer.tools["t0"], {})).is_error is not may


async def test_a_server_that_fails_is_a_result_for_the_model(servers: ToolServers) -> None:
    broken = OfferedTool("t", Tool("t", "", {}), Told(server("bad", BROKEN="1")))
    offer = await servers.open_tools(["one"], TOOLS)
    result = await offer.call(broken, {})
    assert (result.text, result.is_error) == ("The MCP server failed: it ended.", True)


async def test_servers_may_have_as_many_tools_together_as_the_limit(
    servers: ToolServers, access: Access
) -> None:
    many = server("many", COUNT=str(MAX_TOOLS - 1))
    access.apply_rules(rules(many, server("one"), server("two")))
    assert len((await servers.open_tools(["many", "one"], TOOLS)).tools) == MAX_TOOLS
    with pytest.raises(RequestError, match=f"have {MAX_TOOLS + 1} tools together; {MAX_TOOLS} are"):
        await servers.open_tools(["many", "one", "two"], TOOLS)


# ---------------------------------------------------------------- names


def named(*pairs: tuple[str, str]) -> list[str]:
    """The names by which a model calls tools, given by server and own name."""
    tools = [(ToolServer(server(of)), Tool(name, "", {})) for of, name in pairs]
    offered = name_tools(tools)
    assert [one.tool.name for one in offered.values()] == [name for _, name in pairs]
    assert [one.server.server.name for one in offered.values()] == [of for of, _ in pairs]
    assert all(name == one.name and len(name) <= 64 for name, one in offered.items())
    return list(offered)


def test_a_tool_keeps_its_name_as_far_as_a_function_may_have_it() -> None:
    assert named(("s", "look_up-2")) == ["look_up-2"]
    assert named(("s", "look.up")) == ["look_up"]


def test_tools_of_one_name_have_the_names_of_their_servers() -> None:
    assert named(("a b", "look"), ("c", "look"), ("c", "see")) == ["a_b_look", "c_look", "see"]
    assert named(("s", "a.b"), ("s", "a_b")) == ["s_a_b", "s_a_b_2"]


def test_names_that_are_still_alike_are_numbered_and_none_is_too_long() -> None:
    assert named(("s", "x"), ("s", "x")) == ["s_x", "s_x_2"]
    assert len(named(*[("s", "x")] * 12)) == 12
    long = "n" * 64
    first, second = named(("s", long), ("s", long))
    assert first == f"s_{'n' * 62}" and second == f"s_{'n' * 58}_2"


# ---------------------------------------------------------------- the life of servers


async def test_a_reload_ends_servers_that_have_changed_and_keeps_the_others(
    servers: ToolServers, access: Access
) -> None:
    one, two = await find(servers, "one"), await find(servers, "two")
    access.apply_rules(rules(server("one"), server("two", COUNT="2"), server("three")))
    assert servers.list_names(TOOLS) == ("one", "two", "three")
    assert await find(servers, "one") is one
    assert await find(servers, "two") is not two
    assert isinstance(two, Told) and two.closed
    assert isinstance(one, Told) and not one.closed


async def test_a_server_named_by_its_address_is_kept_for_the_next_use(servers: ToolServers) -> None:
    first = await find(servers, URL)
    assert first.server == McpServer("tools.example", url=URL)
    assert await find(servers, URL) is first


async def test_one_address_too_many_ends_the_server_that_was_used_least_recently(
    servers: ToolServers,
) -> None:
    urls = [f"{URL}/{number}" for number in range(16)]
    first, second, *others = [await find(servers, url) for url in urls]
    assert await find(servers, urls[0]) is first  # used again: the second is the oldest now
    await find(servers, URL)
    assert isinstance(second, Told) and second.closed
    assert not any(isinstance(one, Told) and one.closed for one in (first, *others))


async def test_at_the_end_all_servers_are_closed(servers: ToolServers) -> None:
    opened = await asyncio.gather(*(find(servers, name) for name in ("one", "two", URL)))
    await servers.close()
    assert all(isinstance(one, Told) and one.closed for one in opened)


def test_servers_can_be_started_where_the_package_is_installed() -> None:
    pytest.importorskip("mcp")
    assert can_start_servers()
