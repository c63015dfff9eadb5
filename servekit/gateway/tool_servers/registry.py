"""The MCP servers of a gateway: those of the file, and those that administrators name on the page.

offer = await servers.open_tools(["search"], caller)   # starts them
result = await offer.call(offer.find("look_up"), {...})
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import structlog

from servekit.config.sections.mcp import check_url
from servekit.errors import RequestError
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.auth.authorization import Access
from servekit.gateway.tool_servers.messages import MAX_TOOLS, Ready, Result, Tool
from servekit.gateway.tool_servers.server import ToolServer, ToolServerError
from servekit.protocol.access import McpServer

log: Any = structlog.get_logger("servekit.gateway")

#: The most servers that are named on the page; one more ends the one that was used least recently.
_MOST_NAMED = 16
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool with the name by which a model calls it, unique in its offer."""

    name: str
    tool: Tool
    server: ToolServer

    def define(self) -> dict[str, Any]:
        """Return its definition in the form of OpenAI's API."""
        described = {"name": self.name, "description": self.tool.description}
        function = {**described, "parameters": self.tool.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of some servers, offered to a model by one caller."""

    tools: Mapping[str, OfferedTool] = field(default_factory=dict)  # by name
    key: str = ""  # name of the caller's key
    #: Whether the caller may still use a server: a reload changes the rights of keys.
    may_call: Callable[[ToolServer], bool] = lambda server: True

    def define(self) -> list[dict[str, Any]]:
        """Return the definitions of all tools in the form of OpenAI's API."""
        return [tool.define() for tool in self.tools.values()]

    async def call(self, offered: OfferedTool, arguments: Mapping[str, Any]) -> Result:
        """Call a tool; a server that fails gives a result that says so."""
        name, began_s = offered.server.server.name, time.monotonic()
        if not self.may_call(offered.server):
            return Result(0, "The key may not use this tool any more.", is_error=True)
        try:
            result = await offered.server.call_tool(offered.tool.name, arguments)
        except ToolServerError as error:
            result = Result(0, f"The MCP server failed: {error}.", is_error=True)
        log.info(
            "tool_called",
            server=name,
            tool=offered.tool.name,
            failed=result.is_error,
            took_s=round(time.monotonic() - began_s, 3),
            **({"key": self.key} if self.key else {}),
        )
        return result


class ToolServers:
    """All MCP servers of this gateway. They start when they are first used."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._configured: dict[str, ToolServer] = {}
        self._named: dict[str, ToolServer] = {}  # by URL, the one used last at the end
        self._closing: set[asyncio.Task[None]] = set()
        access.on_change(self._apply_rules)
        self._apply_rules()

    def list_names(self, caller: ApiKey | None) -> tuple[str, ...]:
        """Return the names of the servers of the file, if `caller` may use them."""
        return tuple(self._configured) if may_use_tools(caller) else ()

    async def list_tools(
        self, names: Sequence[str], caller: ApiKey | None
    ) -> dict[str, Ready | str]:
        """Return the tools of each server, or why it has none. A name may be a URL."""
        servers = {name: self._find(name, caller) for name in dict.fromkeys(names)}

        async def look(server: ToolServer | str) -> Ready | str:
            if isinstance(server, str):
                return server
            try:
                return await server.list_tools()
            except ToolServerError as error:
                return str(error)

        found = await asyncio.gather(*map(look, servers.values()))
        return dict(zip(servers, found, strict=True))

    async def open_tools(self, names: Sequence[str], caller: ApiKey | None) -> Offer:
        """Return the tools of some servers; a name may be a URL.

        Raises RequestError if one of them cannot be used, or all have too many tools together.
        """
        listed = await self.list_tools(names, caller)
        pairs: list[tuple[ToolServer, Tool]] = []
        for name, found in listed.items():
            server = self._find(name, caller)
            if isinstance(found, str) or isinstance(server, str):
                reason = found if isinstance(found, str) else server
                raise RequestError(f"the tools of {name} cannot be used: {reason}")
            pairs += [(server, tool) for tool in found.tools]
        if len(pairs) > MAX_TOOLS:
            raise RequestError(
                f"these MCP servers have {len(pairs)} tools together; {MAX_TOOLS} are allowed:"
                " choose fewer servers"
            )
        key = caller.rule.name if caller else ""
        return Offer(name_tools(pairs), key, partial(self._may_call, caller))

    async def close(self) -> None:
        """End all servers, and wait until their processes are gone."""
        servers = [*self._configured.values(), *self._named.values()]
        await asyncio.gather(*(server.close() for server in servers), *self._closing)

    # ---- which servers there are

    def _find(self, name: str, caller: ApiKey | None) -> ToolServer | str:
        """Return a server, or why `caller` cannot use it."""
        if not may_use_tools(caller):
            return "this needs a key with `tools: true`"
        if name in self._configured:
            return self._configured[name]
        if "://" not in name:
            return "there is no such server any more"
        assert caller is not None
        if not caller.rule.admin:
            return "a server by its address needs a key with `admin: true`"
        return self._find_named(name)

    def _may_call(self, caller: ApiKey | None, server: ToolServer) -> bool:
        if caller is None or not may_use_tools(caller):
            return False
        return caller.rule.admin or server not in self._named.values()

    def _find_named(self, url: str) -> ToolServer | str:
        server = self._named.pop(url, None)
        if server is None:
            try:
                check_url(url)
            except ValueError as error:
                return f"its address {error}"
            server = ToolServer(McpServer(urlsplit(url).netloc, url=url))
            while len(self._named) >= _MOST_NAMED:
                self._close(self._named.pop(next(iter(self._named))))
        self._named[url] = server
        return server

    def _apply_rules(self) -> None:
        """Take over the file's servers; one that has changed is ended, and starts when used."""
        before, self._configured = self._configured, {}
        for server in self._access.rules.mcp:
            known = before.get(server.name)
            if known is not None and known.server == server:
                self._configured[server.name] = before.pop(server.name)
            else:
                self._configured[server.name] = ToolServer(server)
        for one in before.values():
            self._close(one)

    def _close(self, server: ToolServer) -> None:
        task = asyncio.get_running_loop().create_task(server.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


@cache
def can_start_servers() -> bool:
    """Return whether the package that speaks with MCP servers is installed."""
    return find_spec("mcp") is not None


def may_use_tools(caller: ApiKey | None) -> bool:
    """Return whether a visitor may use MCP servers; without keys only the owner may."""
    return caller is not None and (caller.rule.tools or caller.rule.admin)


def name_tools(tools: Sequence[tuple[ToolServer, Tool]]) -> dict[str, OfferedTool]:
    """Return tools by names that a model can call: their own, unless two of them are alike."""
    named: dict[str, OfferedTool] = {}
    wanted = [_NOT_IN_NAMES.sub("_", tool.name) for _, tool in tools]
    for (server, tool), name in zip(tools, wanted, strict=True):
        if wanted.count(name) > 1:
            name = f"{_NOT_IN_NAMES.sub('_', server.server.name)}_{name}"[:_MAX_NAME_CHARS]
        number = 1
        while name in named:
            number += 1
            name = f"{name[: _MAX_NAME_CHARS - 4]}_{number}"
        named[name] = OfferedTool(name, tool, server)
    return named
