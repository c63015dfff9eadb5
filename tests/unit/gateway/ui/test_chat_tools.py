"""Calls of tools in a chat: a real MCP server, a real router, and an engine that asks for calls.

The echo engine answers with the last message: a question in the form of calls with those calls, and
their result with itself. Here it gives as many tokens as that message has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from servekit.errors import RequestError
from servekit.gateway.auth.api_key import ApiKey
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.tool_servers.messages import Ready, Tool
from servekit.gateway.tool_servers.registry import Offer, ToolServers
from servekit.gateway.ui import chat_session
from servekit.gateway.ui.chat_session import MOST_CALLS, Chats, Decision, View
from servekit.gateway.ui.chat_tools import render_question, render_servers
from servekit.gateway.ui.chat_turns import show_turns
from servekit.gateway.ui.conversation import (
    NOT_MADE,
    Settings,
    StoredCall,
    StoredMessage,
    is_answered,
    make_messages,
    parse_turns,
    turn_at,
)
from servekit.gateway.ui.pages.language import SAY_ENGLISH, Say
from servekit.gateway.ui.widgets.request_runner import Runs, Visit
from servekit.protocol.access import McpServer
from servekit.protocol.messages import AccessRules, KeyRule, Topology
from tests.unit.gateway.conftest import DEADLINE_S, Service

pytest.importorskip("mcp")
ODD = str(Path(__file__).parents[1] / "tool_servers" / "odd_tools.py")
#: Of the tests that share a server, which is used on one loop.
on_one_loop = pytest.mark.asyncio(loop_scope="module")


def write_call(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


class Page:
    """A visitor with a conversation, who answers the questions before calls."""

    def __init__(self, service: Service, servers: ToolServers) -> None:
        self.service = service
        self.servers = servers
        self.chats = Chats(service.router, Runs(service.router))
        self.caller = ApiKey(KeyRule("k", tools=True), 0.0)
        self.asked: list[str] = []

    async def ask(
        self,
        text: str,
        *decisions: Decision,
        conversation: str = "c",
        model: str = "m",
        names: tuple[str, ...] = ("odd",),
    ) -> list[View]:
        """Return all views of the answer to one question."""
        answers = iter(decisions)
        views = []
        async with asyncio.timeout(DEADLINE_S):
            async for view in self.stream(text, conversation, model, names):
                views.append(view)
                if view.asks is not None:
                    self.asked.append(view.asks["tool"])
                    self.chats.decide_call("s", view.asks["id"], next(answers))
        return views

    def stream(
        self, text: str, conversation: str = "c", model: str = "m", names: Any = ("odd",)
    ) -> AsyncIterator[View]:
        async def open_offer() -> Offer:
            return await self.servers.open_tools(names, self.caller)

        turns = [StoredMessage(role="user", content=text)]
        visit = Visit("s", "ui")
        return self.chats.answer_turn(visit, model, turns, Settings(), {}, open_offer, conversation)


@contextlib.asynccontextmanager
async def open_page(folder: Path) -> AsyncIterator[Page]:
    service = Service(folder)
    [worker] = await service.up(said={"tool_parser": "hermes"})
    status = replace(service.router.routes["m"].status, info=worker.runner.info)
    command = (sys.executable, ODD, str(folder / "pid"))
    access = AccessRules(mcp=(McpServer("odd", command),))
    service.router.apply_topology(Topology((status,), access=access))
    take = service.router.queue_call

    def open_once(call: InflightRequest, timeout_s: float | None = None) -> InflightRequest:
        assert call.messages is not None
        call.params = replace(call.params, max_tokens=len(call.messages[-1].content))
        return take(call, timeout_s)

    servers = ToolServers(service.router.access)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.router, "queue_call", open_once)
        try:
            yield Page(service, servers)
        finally:
            await servers.close()
            service.stop()


@pytest_asyncio.fixture
async def own_page(tmp_path: Path) -> AsyncIterator[Page]:
    """A page whose server a test may end."""
    async with open_page(tmp_path) as page:
        yield page


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    """A server takes two seconds of CPU to start."""
    async with open_page(tmp_path_factory.mktemp("chat-tools")) as page:
        yield page


@pytest.fixture
def page(shared: Page) -> Page:
    """A visitor of the shared service, who has asked nothing yet."""
    return Page(shared.service, shared.servers)


def calls_of(view: View) -> list[StoredCall]:
    return [call for turn in view.turns for call in turn.get("calls", [])]


@on_one_loop
async def test_a_call_is_made_after_it_was_allowed_and_its_result_is_answered(page: Page) -> None:
    views = await page.ask(write_call("add", a=1, b=2), "allow")
    assert page.asked == ["add"]
    before = next(view for view in views if view.asks)
    [asked] = calls_of(before)
    assert "outcome" not in asked and before.save
    last = views[-1]
    [call] = calls_of(last)
    assert (call["server"], call["outcome"], call["result"]) == ("odd", "done", "3")
    assert json.loads(call["arguments"]) == {"a": 1, "b": 2}
    assert last.turns[-1]["content"] == "3"
    assert (last.busy, last.save, last.error) == (False, True, "")
    assert page.service.router.in_flight == 0


@on_one_loop
async def test_a_declined_call_is_not_made_and_the_model_is_told(
    page: Page, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    views = await page.ask(write_call("hang", begun=str(begun)), "decline")
    [call] = calls_of(views[-1])
    assert call["outcome"] == "declined" and "result" not in call
    assert not begun.exists()
    assert views[-1].turns[-1]["content"] == NOT_MADE


@on_one_loop
async def test_each_call_is_asked_for_unless_its_tool_is_always_allowed(page: Page) -> None:
    two = write_call("add", a=1, b=2) + write_call("add", a=3, b=4)
    views = await page.ask(two, "allow", "decline")
    assert [call["outcome"] for call in calls_of(views[-1])] == ["done", "declined"]
    await page.ask(write_call("add", a=1, b=2) + write_call("fail"), "always", "allow")
    await page.ask(write_call("add", a=5, b=6))
    await page.ask(write_call("fail"), "decline")  # another tool of the same server
    await page.ask(write_call("add", a=5, b=6), "decline", conversation="other")
    assert page.asked == ["add", "add", "add", "fail", "fail", "add"]


@on_one_loop
async def test_of_too_many_calls_at_once_the_first_are_asked_for(page: Page) -> None:
    views = await page.ask(write_call("add", a=1, b=1) * (MOST_CALLS + 2), "always")
    outcomes = [call["outcome"] for call in calls_of(views[-1])]
    assert outcomes == ["done"] * MOST_CALLS + ["failed"] * 2


@on_one_loop
async def test_a_decision_for_another_call_is_passed_over(page: Page) -> None:
    stream = page.stream(write_call("add", a=1, b=2))
    async for view in stream:
        if view.asks is not None:
            page.chats.decide_call("s", "call_of_somebody", "allow")
            page.chats.decide_call("another session", view.asks["id"], "allow")
            page.chats.decide_call("s", view.asks["id"], "decline")
            page.chats.decide_call("s", view.asks["id"], "allow")  # a second click
        last = view
    assert [call["outcome"] for call in calls_of(last)] == ["declined"]


@on_one_loop
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (write_call("rm", path="/"), "There is no tool 'rm'"),
        (write_call("fail"), "no such city"),
        (write_call("add", a="x"), "validation error"),
    ],
)
async def test_what_goes_wrong_is_a_result_for_the_model(page: Page, text: str, said: str) -> None:
    views = await page.ask(text, "allow")
    [call] = calls_of(views[-1])
    assert call["outcome"] == "failed" and said in call["result"]
    assert said in views[-1].turns[-1]["content"] and not views[-1].error


async def test_a_server_that_crashes_is_a_result_for_the_model(own_page: Page) -> None:
    await test_what_goes_wrong_is_a_result_for_the_model(
        own_page, write_call("crash"), "The MCP server failed"
    )


@on_one_loop
async def test_stop_ends_a_question_and_a_call(page: Page, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    text = write_call("hang", begun=str(begun))

    async def stop_at(is_time: Any) -> View:
        async for view in page.stream(text):
            if view.asks is not None and not is_time(view):
                page.chats.decide_call("s", view.asks["id"], "allow")
            if is_time(view):
                page.chats.stop_answer("s")
            last = view
        return last

    last = await stop_at(lambda view: view.asks is not None)
    assert [call["outcome"] for call in calls_of(last)] == ["declined"]
    assert (last.busy, last.error, begun.exists()) == (False, "", False)
    last = await stop_at(lambda view: view.calling and begun.exists())
    assert [call["outcome"] for call in calls_of(last)] == ["declined"]
    assert (last.busy, last.error) == (False, "")
    assert not is_answered(last.turns)


@on_one_loop
async def test_a_page_that_is_left_makes_no_call(page: Page, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    stream = page.stream(write_call("hang", begun=str(begun)))
    async for view in stream:
        if view.asks is not None:
            break
    id = view.asks["id"] if view.asks else ""
    await stream.aclose()  # type: ignore[attr-defined]
    page.chats.decide_call("s", id, "allow")
    assert not begun.exists()


@on_one_loop
async def test_a_new_question_leaves_the_call_that_was_asked_for(page: Page) -> None:
    stream = page.stream(write_call("add", a=1, b=2))
    async for view in stream:
        if view.asks is not None:
            break
    assert (await page.ask("hello"))[-1].turns[-1]["content"] == "hello"
    assert [view async for view in stream] == []


@on_one_loop
async def test_a_model_that_calls_for_ever_is_stopped(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_session, "MOST_ROUNDS", 3)
    # the echo engine answers a result with itself: this one is a call again
    again = write_call("show_call")
    views = await page.ask(again, "always")
    assert "3 times" in views[-1].error
    assert len(calls_of(views[-1])) == 3


@on_one_loop
async def test_servers_that_cannot_be_used_end_the_answer_with_a_sentence(page: Page) -> None:
    last = (await page.ask("hello", names=("odd", "gone")))[-1]
    assert last.error == "the tools of gone cannot be used: there is no such server any more"
    assert Say("zh").translate(last.error) == "无法使用 gone 的工具：此服务器已不存在"
    assert not last.busy
    page.caller = ApiKey(KeyRule("k"), 0.0)
    assert "tools: true" in (await page.ask("hello"))[-1].error
    page.caller = ApiKey(KeyRule("k", tools=True), 0.0)
    last = (await page.ask("hello", names=("http://127.0.0.1:9/mcp",)))[-1]
    assert "admin: true" in last.error
    page.caller = ApiKey(KeyRule("k", admin=True), 0.0)
    last = (await page.ask("hello", names=("http://u:p@127.0.0.1/",)))[-1]
    assert "`headers`" in last.error


async def test_a_reload_ends_a_server_that_is_no_longer_in_the_file(own_page: Page) -> None:
    offer = await own_page.servers.open_tools(["odd"], own_page.caller)
    own_page.service.router.access.apply_rules(AccessRules())
    assert own_page.servers.list_names(own_page.caller) == ()
    result = await offer.call(offer.tools["add"], {"a": 1, "b": 2})  # while it is ending
    assert result.is_error and "no longer offered" in result.text
    with pytest.raises(RequestError):
        await own_page.servers.open_tools(["odd"], own_page.caller)


async def test_tools_of_the_same_name_are_told_apart(own_page: Page, tmp_path: Path) -> None:
    command = (sys.executable, ODD, str(tmp_path / "pid2"))
    rules = own_page.service.router.access.rules
    both = AccessRules(mcp=(*rules.mcp, McpServer("second one", command)))
    own_page.service.router.access.apply_rules(both)
    offer = await own_page.servers.open_tools(["odd", "second one"], own_page.caller)
    assert {"odd_add", "second_one_add"} <= set(offer.tools)
    result = await offer.call(offer.tools["second_one_add"], {"a": 1, "b": 2})
    assert result.text == "3"


def test_calls_are_messages_with_results() -> None:
    call = StoredCall(id="c1", name="add", tool="add", server="odd", arguments='{"a": 1}')
    turns = parse_turns(
        [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": "",
                "calls": [{**call, "outcome": "done", "result": "1"}, {**call, "id": "c2"}],
            },
            {"role": "assistant", "content": "one"},
        ]
    )
    messages = make_messages(turns, {})
    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert [message["content"] for message in messages[2:4]] == ["1", NOT_MADE]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    without = make_messages(turns, {}, with_calls=False)
    assert [message["role"] for message in without] == ["user", "assistant"]
    assert [turn_at(turns, shown) for shown in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("calls", [1, [1], [{}], [{"id": "x"}], "calls", [{"outcome": "done"}]])
def test_malformed_calls_are_left_out(calls: Any) -> None:
    stored = {"role": "assistant", "content": "x", "calls": calls}
    assert parse_turns([stored]) == [StoredMessage(role="assistant", content="x")]


def test_what_servers_and_models_write_is_escaped() -> None:
    bad = '<img src=x onerror="alert(1)">\u202e\x1b[31m'
    call = StoredCall(id="c1", name=bad, tool=bad, server=bad, arguments=bad)
    made: StoredCall = {**call, "outcome": "failed", "result": bad}
    turns = [StoredMessage(role="assistant", content="", calls=[made])]
    shown = msgspec.json.encode(show_turns(turns, SAY_ENGLISH)).decode()
    listed: dict[str, Ready | str] = {bad: Ready((Tool(bad, bad, {}),), (bad,)), "other": bad}
    for html in (shown, render_question(call, SAY_ENGLISH), render_servers(listed, SAY_ENGLISH)):
        assert "<img" not in html and "\u202e" not in html and "\x1b" not in html
