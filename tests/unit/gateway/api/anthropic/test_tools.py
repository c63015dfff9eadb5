"""Anthropic's tools and their choice in OpenAI's form, and the sentences for wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.anthropic.tools import Tool, ToolChoice, tool_choice, tools

SCHEMA: dict[str, Any] = {"type": "object"}
LOOK = Tool("look", None, SCHEMA)
SEE = Tool("see", None, SCHEMA)


def test_a_tool_is_a_function_with_what_was_said_of_it_and_no_more() -> None:
    full = Tool("see", "sees", SCHEMA, "custom", True)
    off = Tool("a-b_C9", "", SCHEMA, None, False)
    assert tools([LOOK, full, off]) == [
        {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
        {
            "type": "function",
            "function": {
                "name": "see", "parameters": SCHEMA, "description": "sees", "strict": True,
            },
        },
        {
            "type": "function",
            "function": {
                "name": "a-b_C9", "parameters": SCHEMA, "description": "", "strict": False,
            },
        },
    ]  # fmt: skip
    assert tools(None) == tools([]) == []


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (Tool("", None, SCHEMA), "tools[1].name: expected 1 to 64 letters, digits, _ or -"),
        (Tool("a b", None, SCHEMA), "tools[1].name: expected 1 to 64 letters, digits, _ or -"),
        (Tool("n" * 65, None, SCHEMA), "tools[1].name: expected 1 to 64 letters, digits, _ or -"),
        (Tool("see"), "tools[1].input_schema is required"),
        (LOOK, "tools: there are two named 'look'"),
    ],
)
def test_a_wrong_tool_is_named_by_its_place(tool: Tool, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        tools([LOOK, tool])
    assert (refused.value.message, refused.value.param) == (said, "tools")


def test_the_longest_name_is_taken() -> None:
    assert tools([Tool("n" * 64, None, SCHEMA)])[0]["function"]["name"] == "n" * 64


def test_a_tool_of_anthropics_own_is_not_there() -> None:
    with pytest.raises(Unsupported, match=r"tools\[0\]: 'bash_20250124' is a tool that Anthropic"):
        tools([Tool("bash", type="bash_20250124")])


@pytest.mark.parametrize(
    ("choice", "given", "expected"),
    [
        (None, None, (None, True)),
        (None, [LOOK], (None, True)),
        (ToolChoice("auto"), [LOOK], ("auto", True)),
        (ToolChoice("any"), [LOOK], ("required", True)),
        (ToolChoice("any", None, True), [LOOK], ("required", False)),
        (ToolChoice("auto", None, False), [LOOK], ("auto", True)),
        # nothing is chosen: it does not matter whether there is anything to choose from
        (ToolChoice("none"), None, ("none", True)),
        (ToolChoice("none", None, True), [LOOK], ("none", False)),
        (
            ToolChoice("tool", "see"),
            [LOOK, SEE],
            ({"type": "function", "function": {"name": "see"}}, True),
        ),
    ],
)
def test_a_choice_in_openais_form(
    choice: ToolChoice | None, given: list[Tool] | None, expected: tuple[Any, bool]
) -> None:
    assert tool_choice(choice, given) == expected


@pytest.mark.parametrize(
    ("choice", "given", "said"),
    [
        (ToolChoice("any"), None, "tool_choice: there are no tools to choose from"),
        (ToolChoice("auto"), [], "tool_choice: there are no tools to choose from"),
        (ToolChoice("tool", "see"), [LOOK], "tool_choice.name: there is no tool named 'see'"),
        (ToolChoice("tool"), [LOOK], "tool_choice.name: there is no tool named None"),
    ],
)
def test_a_choice_among_none_is_refused(
    choice: ToolChoice, given: list[Tool] | None, said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        tool_choice(choice, given)
    assert (refused.value.message, refused.value.param) == (said, "tool_choice")


def test_a_deferred_tool_is_there_once_it_is_found() -> None:
    later = Tool("later", None, SCHEMA, defer_loading=True)
    names = [one["function"]["name"] for one in tools([LOOK, later])]
    assert names == ["look"]
    names = [one["function"]["name"] for one in tools([LOOK, later], {"later", "other"})]
    assert names == ["look", "later"]
    with pytest.raises(RequestError, match="two named 'later'"):
        tools([later, later])
