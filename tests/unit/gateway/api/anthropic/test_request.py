"""What Anthropic's blocks become for a chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.errors import RequestError
from servekit.gateway.api.anthropic.request import (
    Conversation,
    MessagesRequest,
    conversation,
    sampling,
)
from servekit.gateway.api.openai.schema import decode
from servekit.protocol.messages import ChatMessage, ToolCall

USE = {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "ä"}}
SEE = {"type": "tool_use", "id": "2", "name": "see", "input": {}}


def result(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **fields}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def request(*messages: tuple[str, Any], **fields: Any) -> MessagesRequest:
    listed = [{"role": role, "content": content} for role, content in messages]
    body = {"model": "m", "max_tokens": 2000, "messages": listed, **fields}
    return decode(MessagesRequest, json.dumps(body).encode())


def talk(*messages: tuple[str, Any], **fields: Any) -> Conversation:
    return conversation(request(*messages, **fields))


def test_results_are_messages_in_their_places_between_the_texts() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    results = [result("2", content="b"), text("and"), result("1", content=[text("c"), text("d")])]
    said = talk(
        ("user", "?"),
        ("assistant", [thought, text("a"), USE, SEE]),
        ("user", results),
        ("user", "now"),
        system=[text("x"), text("y")],
    )
    calls = (ToolCall("1", "look", '{"at":"ä"}'), ToolCall("2", "see", "{}"))
    assert said.messages == [
        ChatMessage("system", "x\ny"),
        ChatMessage("user", "?"),
        ChatMessage("assistant", "a", None, calls, None, "hm"),
        ChatMessage("tool", "b", "see", (), "2"),
        ChatMessage("user", "and"),
        ChatMessage("tool", "c\nd", "look", (), "1"),
        ChatMessage("user", "now"),
    ]
    assert not said.continues


def test_documents_and_search_results_are_their_text() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    pieces = {"type": "content", "content": [text("a"), text("b")]}
    blocks = [
        {"type": "document", "source": plain, "title": "Weather", "context": "of today"},
        {"type": "document", "source": pieces, "citations": {"enabled": True}},
        text("So?"),
    ]
    found = {"type": "search_result", "source": "http://a", "title": "A", "content": [text("c")]}
    told = result("1", content=[found, {"type": "document", "source": plain | {"data": "d"}}])
    said = talk(("user", blocks), ("assistant", [USE]), ("user", [told]))
    assert said.messages[0] == ChatMessage("user", "Weather\nof today\nIt rains.\na\nb\nSo?")
    assert said.messages[2].content == "A\nhttp://a\nc\nd"


def test_a_result_that_names_tools_makes_them_known() -> None:
    found = [{"type": "tool_reference", "tool_name": "see"}, text("one")]
    said = talk(("assistant", [USE]), ("user", [result("1", content=found)]))
    assert said.messages[-1].content == "The tool see can be called now.\none"
    assert said.found_tools == {"see"}
    with pytest.raises(RequestError, match="tool_reference"):
        talk(("user", found))


def test_messages_of_one_role_in_a_row_are_one() -> None:
    said = talk(("user", "a"), ("user", [text("b")]), ("assistant", "c"), ("assistant", [USE]),
                ("user", [result("1"), result("1")]))  # fmt: skip
    assert [(m.role, m.content, len(m.tool_calls)) for m in said.messages] == [
        ("user", "a\nb", 0),
        ("assistant", "c", 1),
        ("tool", "", 0),
        ("tool", "", 0),
    ]


def test_an_error_is_told_to_the_model() -> None:
    said = talk(("assistant", [USE]), ("user", [result("1", content="no", is_error=True)]))
    assert said.messages[-1].content == "Error: no"


@pytest.mark.parametrize(
    ("last", "continues", "count"), [("And", True, 2), ("", False, 1), ([], False, 1)]
)
def test_a_last_message_of_the_assistant_is_a_beginning(
    last: Any, continues: bool, count: int
) -> None:
    said = talk(("user", "a"), ("assistant", last))
    assert (said.continues, len(said.messages)) == (continues, count)


@pytest.mark.parametrize(
    ("thinking", "template"),
    [
        (None, {"enable_thinking": False, "thinking": False}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}),
        ({"type": "adaptive"}, {"enable_thinking": True, "thinking": True}),
        (
            {"type": "enabled", "budget_tokens": 1024},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 1024},
        ),
    ],
)
def test_who_thinks_has_to_be_asked(thinking: Any, template: dict[str, Any]) -> None:
    said = talk(("user", "a"), thinking=thinking)
    assert said.template_defaults | said.template == template
    assert bool(said.template) is (thinking is not None), "the API's own is no wish of the client"
    assert said.thinks == template["thinking"]


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_a_schema_is_a_grammar_by_either_name(field: str) -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    value = format if field == "output_format" else {"format": format, "effort": "low"}
    params = sampling(request(("user", "a"), **{field: value}))
    assert params.grammar is not None
    assert json.loads(params.grammar.text) == {"type": "object"}
    assert params.clamp


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([("user", [result("9")])], "no tool_use block before it has the id '9'"),
        ([("assistant", [USE])], "tool_results has to follow"),
        ([("assistant", [{"type": "tool_use", "name": "a"}])], "needs `id` and `name`"),
        ([("user", [{"type": "document", "source": {"type": "base64"}}])], "send their text"),
        ([("user", [{"type": "document"}])], "send their text"),
        (
            [("user", [{"type": "document", "source": {"type": "content"}}])],
            "messages[0].content[0].source.content is required",
        ),
        ([("user", [{"type": "search_result", "source": "a"}])], "content is required"),
        ([("user", [{"type": "image", "source": "a"}])], "an image needs its source"),
        (
            [("user", [{"type": "search_result", "content": [{"type": "thinking"}]}])],
            "messages[0].content[0].content[0]: this takes text, not 'thinking'",
        ),
        ([("user", [{"type": "text"}])], "needs `text`"),
        ([("user", [{"type": "tool_result"}])], "tool_use_id is required"),
    ],
)
def test_what_is_wrong_is_named_by_its_place(messages: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        talk(*messages)
    assert says in str(caught.value)
    assert str(caught.value).startswith("messages")
