"""What a host process makes of all that an MCP server may list, return or fail with."""

from __future__ import annotations

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from servekit.gateway.tool_servers.host import (
    Host,
    cut,
    describe_content,
    explain,
    is_answer,
    list_tools,
    read_message,
    refuse_tool,
)
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
    Tool,
    pack,
)
from tests.polling import poll_async

pytest.importorskip("mcp")
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
    TextResourceContents,
)
from mcp_types import Tool as Listed

SCHEMA: dict[str, Any] = {"type": "object"}


def text(said: str) -> TextContent:
    return TextContent(type="text", text=said)


# ---------------------------------------------------------------- results


def test_a_result_is_its_texts_and_the_kinds_of_all_else() -> None:
    page = TextResourceContents(uri="file:///a", text="a page")
    blob = BlobResourceContents(uri="file:///b", blob="AAAA")
    result = CallToolResult(
        content=[
            text("one"),
            ImageContent(type="image", data="AAAA", mime_type="image/png"),
            EmbeddedResource(type="resource", resource=page),
            EmbeddedResource(type="resource", resource=blob),
            text("two"),
        ],
        structured_content={"not": "shown"},
    )
    assert describe_content(result).split("\n") == [
        "one",
        "[a part of the kind image/png is not shown]",
        "a page",
        "[a part of the kind resource is not shown]",
        "two",
    ]


def test_a_result_without_parts_is_its_object() -> None:
    assert describe_content(CallToolResult(content=[], structured_content={"ä": 1})) == '{"ä": 1}'
    assert describe_content(CallToolResult(content=[])) == ""


def test_the_kind_of_a_part_is_cut_for_it_is_the_servers_text() -> None:
    part = ImageContent(type="image", data="AAAA", mime_type="x" * 1000)
    assert describe_content(CallToolResult(content=[part])) == (
        f"[a part of the kind {'x' * 100} is not shown]"
    )


def test_a_text_is_cut_behind_its_limit_with_a_note() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("abcde", 3) == "abc\n[cut: 2 more characters]"
    assert cut("a\ud800b", 9) == "a?b"  # no message carries a lone surrogate


# ---------------------------------------------------------------- failures


def test_an_error_of_the_server_is_an_answer_and_the_end_of_the_connection_is_none() -> None:
    assert is_answer(MCPError(-32602, "wrong"))
    assert not is_answer(MCPError(CONNECTION_CLOSED, "closed"))
    assert not is_answer(ValueError("broken"))


def test_a_failure_is_explained_in_a_short_sentence() -> None:
    assert explain(ValueError("  why ")) == "why"
    assert explain(ValueError()) == "ValueError"
    inner = ExceptionGroup("inner", [OSError("no route"), OSError("other")])
    assert explain(ExceptionGroup("outer", [inner])) == "no route"
    assert explain(ValueError("x" * 600)) == f"{'x' * 500}\n[cut: 100 more characters]"


# ---------------------------------------------------------------- the list of tools


class Pages:
    """A client of a server that lists its tools in pages."""

    def __init__(self, *pages: list[Listed], endless: bool = False) -> None:
        self.pages, self.endless, self.asked = pages, endless, 0

    async def list_tools(self, cursor: str | None) -> Any:
        assert cursor == (None if self.asked == 0 else str(self.asked))
        page = self.pages[min(self.asked, len(self.pages) - 1)]
        self.asked += 1
        more = self.endless or self.asked < len(self.pages)
        return SimpleNamespace(tools=page, next_cursor=str(self.asked) if more else None)


def listed(name: str, **fields: Any) -> Listed:
    return Listed(name=name, input_schema=SCHEMA, **fields)


async def test_tools_of_all_pages_are_offered() -> None:
    pages = Pages([listed("a", description="about")], [], [listed("b")])
    assert await list_tools(pages) == Ready((Tool("a", "about", SCHEMA), Tool("b", "", SCHEMA)))
    assert pages.asked == 3


async def test_a_tool_that_cannot_be_offered_is_named_and_the_others_are_offered() -> None:
    found = await list_tools(Pages([listed("a"), listed("a"), listed("no name"), listed("b")]))
    assert [tool.name for tool in found.tools] == ["a", "b"]
    assert found.left_out == (
        "'a' is listed twice",
        "'no name' is no name for a function: letters, digits and _ . - only, 64 at most",
    )


async def test_a_long_description_and_a_long_wrong_name_are_cut() -> None:
    pages = [listed("a", description="x" * 5000), listed("n" * 100)]
    found = await list_tools(Pages(pages))
    assert found.tools[0].description == f"{'x' * 4096}\n[cut: 904 more characters]"
    assert found.left_out[0].startswith(f"{'n' * 64!r} is no name")


async def test_as_many_tools_as_the_limit_are_offered_and_no_more() -> None:
    most = [listed(f"t{number}") for number in range(MAX_TOOLS)]
    assert len((await list_tools(Pages(most))).tools) == MAX_TOOLS
    assert (await list_tools(Pages(most))).left_out == ()
    found = await list_tools(Pages([*most, listed("more")]))
    assert len(found.tools) == MAX_TOOLS
    assert found.left_out == (f"it has more than {MAX_TOOLS} tools; the others are left out",)


async def test_a_list_without_an_end_is_given_up() -> None:
    pages = Pages([listed("a")], [], endless=True)
    found = await list_tools(pages)
    assert [tool.name for tool in found.tools] == ["a"]
    assert found.left_out == ("its list has more than 32 pages; the others are left out",)
    assert pages.asked == 32
    last = await list_tools(Pages(*[[]] * 31, [listed("a")]))
    assert ([tool.name for tool in last.tools], last.left_out) == (["a"], ())


async def test_no_more_sentences_are_told_than_there_may_be_tools() -> None:
    found = await list_tools(Pages([listed("")] * (MAX_TOOLS + 5)))
    assert len(found.left_out) == MAX_TOOLS


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "n" * 64])
def test_a_good_tool_is_not_refused(name: str) -> None:
    assert refuse_tool(name, SCHEMA, {}) == ""


@pytest.mark.parametrize(
    ("name", "schema", "reason"),
    [
        ("", SCHEMA, "is no name for a function"),
        ("n" * 65, SCHEMA, "is no name for a function"),
        ("ä", SCHEMA, "is no name for a function"),
        ("a\n", SCHEMA, "is no name for a function"),
        ("a", {"x": 10**30}, "has parameters that cannot be read"),
        ("a", {"x": "y" * 40_000}, "has a schema of 40006 bytes, too many"),
    ],
)
def test_why_a_tool_is_refused(name: str, schema: dict[str, Any], reason: str) -> None:
    assert reason in refuse_tool(name, schema, {})


# ---------------------------------------------------------------- calls


class Answering:
    """A client whose server answers calls as the tools of these names say."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []

    async def call_tool(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        self.begun.append(tool)
        match tool:
            case "hang":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.cancelled.append(tool)
                    raise
            case "refuse":
                raise MCPError(-32602, "no such city")
            case "break":
                raise MCPError(CONNECTION_CLOSED, "closed")
            case "fail":
                return CallToolResult(content=[text("failed")], is_error=True)
        return CallToolResult(content=[text(tool * arguments.get("times", 1))])


class Bench:
    """A host with its client and its two pipes in memory."""

    def __init__(self) -> None:
        self.client, self.out = Answering(), io.BytesIO()
        self.host, self.commands = Host(self.client, self.out), asyncio.StreamReader()
        self.serving = asyncio.create_task(self.host.serve(self.commands))

    def send(self, *messages: Call | Cancel) -> None:
        for message in messages:
            self.commands.feed_data(pack(message))

    def said(self) -> list[FromHost]:
        data, found = self.out.getvalue(), list[FromHost]()
        while data:
            end = LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "big")
            found.append(msgspec.msgpack.decode(data[LENGTH_BYTES:end], type=FromHost))
            data = data[end:]
        return found


async def test_each_call_is_answered_by_its_id() -> None:
    bench = Bench()
    bench.send(Call(1, "hang", {}), Call(2, "b", {"times": 2}), Call(3, "fail", {}))
    await poll_async("two answers", lambda: len(bench.said()) == 2)
    assert bench.said() == [Result(2, "bb"), Result(3, "failed", is_error=True)]
    bench.commands.feed_eof()
    await bench.serving
    await poll_async("the call that hung is given up", lambda: bench.client.cancelled)


async def test_an_error_that_the_server_answers_with_is_a_result() -> None:
    bench = Bench()
    bench.send(Call(1, "refuse", {}))
    await poll_async("an answer", bench.said)
    assert bench.said() == [Result(1, "no such city", is_error=True)]
    assert not bench.serving.done()
    bench.serving.cancel()


async def test_a_lost_connection_is_told_and_ends_the_host() -> None:
    bench = Bench()
    bench.send(Call(1, "break", {}))
    async with asyncio.timeout(10):
        await bench.serving
    assert bench.said() == [Failed("closed")]


async def test_a_cancelled_call_is_given_up_and_has_no_answer() -> None:
    bench = Bench()
    bench.send(Call(1, "hang", {}))
    await poll_async("the call has begun", lambda: bench.client.begun)
    bench.send(Cancel(1), Cancel(7), Call(2, "b", {}))
    await poll_async("the next answer", bench.said)
    assert bench.said() == [Result(2, "b")]
    assert bench.client.cancelled == ["hang"]
    bench.serving.cancel()


async def test_a_long_result_is_cut() -> None:
    bench = Bench()
    bench.send(Call(1, "b", {"times": MAX_RESULT_CHARS + 1}))
    await poll_async("an answer", bench.said)
    assert bench.said() == [Result(1, f"{'b' * MAX_RESULT_CHARS}\n[cut: 1 more characters]")]
    bench.serving.cancel()


async def test_a_message_is_read_whole_and_half_of_one_is_the_end() -> None:
    call = Call(1, "f", {"a": 1})
    commands = asyncio.StreamReader()
    commands.feed_data(pack(call) + pack(Cancel(2)) + pack(call)[:-1])
    commands.feed_eof()
    assert [await read_message(commands) for _ in range(3)] == [call, Cancel(2), None]
