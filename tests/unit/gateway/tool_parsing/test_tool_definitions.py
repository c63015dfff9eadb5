"""Tools as requests define them, and which may be called."""

from __future__ import annotations

import time
from typing import Any

import pytest

from servekit.errors import RequestError
from servekit.gateway.tool_parsing.tool_definitions import (
    check_tools,
    choice_by_word,
    parse_tool_choice,
)


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


TOOLS = [tool("f"), tool("g")]


def test_good_definitions_pass_as_they_are() -> None:
    tools = [tool("get_weather-2", description="x", parameters={"type": "object"}, strict=True)]
    assert check_tools(tools) is tools
    assert check_tools([tool("a" * 64, parameters=None, description=None, strict=None)])
    assert check_tools(None) == check_tools([]) == []


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ("f", "tools"),
        ([None], "tools[0]"),
        ([tool(), {"type": "web_search"}], "tools[1].type"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(None)], "tools[0].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool("é")], "tools[0].function.name"),
        ([tool("f\n")], "tools[0].function.name"),
        ([tool("a" * 65)], "tools[0].function.name"),
        ([tool("f"), tool("f")], "tools[1].function.name"),
        ([tool(description=1)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
    ],
)
def test_what_is_wrong_is_named(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_tools(tools)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("choice", "mode", "names", "once"),
    [
        (None, "auto", ["f", "g"], False),
        ("auto", "auto", ["f", "g"], False),
        ("none", "none", [], False),
        ("required", "required", ["f", "g"], False),
        ({"type": "function", "function": {"name": "g"}}, "required", ["g"], True),
        ({"type": "function", "name": "g"}, "required", ["g"], True),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [tool("g"), tool("g")]},
            },
            "required",
            ["g"],
            False,
        ),
        (
            {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
            "auto",
            ["f"],
            False,
        ),
    ],
)
def test_choices(choice: Any, mode: str, names: list[str], once: bool) -> None:
    found = parse_tool_choice(TOOLS, choice)
    assert (found.mode, found.once) == (mode, once)
    assert [tool["function"]["name"] for tool in found.tools] == names


def test_a_long_list_of_allowed_tools_takes_little_time() -> None:
    tools = [tool(f"f{at}") for at in range(1000)]
    listed = [tool("f999")] * 100_000 + [tool("f0")]
    began_s = time.process_time()
    found = parse_tool_choice(tools, {"type": "allowed_tools", "tools": listed})
    assert time.process_time() - began_s < 2
    assert list(found.tools) == [tools[999], tools[0]]


def test_without_tools_there_is_no_choice() -> None:
    assert (
        parse_tool_choice([], None).mode
        == parse_tool_choice([], "auto").mode
        == parse_tool_choice([], "none").mode
        == "none"
    )


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("always", "tool_choice"),
        (1, "tool_choice"),
        ({}, "tool_choice"),
        ({"type": "function"}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice.function.name"),
        ({"type": "function", "function": []}, "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools", "allowed_tools": []}, "tool_choice.allowed_tools.tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [tool("f")], "mode": "none"}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [3]}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ],
)
def test_what_is_wrong_with_a_choice_is_named(choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tool_choice(TOOLS, choice)
    assert caught.value.param == param


def test_nothing_can_be_required_without_tools() -> None:
    with pytest.raises(RequestError, match="no tools"):
        parse_tool_choice([], "required")


def test_a_choice_may_be_one_word() -> None:
    assert choice_by_word(TOOLS, "required") == parse_tool_choice(TOOLS, "required")
    assert choice_by_word(TOOLS, "none") == parse_tool_choice(TOOLS, "none")
    assert choice_by_word(TOOLS, "g") == parse_tool_choice(TOOLS, {"type": "function", "name": "g"})
    with pytest.raises(RequestError, match="'h'"):
        choice_by_word(TOOLS, "h")
