"""What the items of a Responses request become, and the sentences for wrong ones."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest

from servekit.errors import RequestError
from servekit.gateway.api.openai.responses_schema import (
    Item,
    ResponsesRequest,
    ask_of,
    items_of,
    to_messages,
)
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.generation.generation import GenerationRequest
from servekit.protocol.messages import ChatMessage, Grammar, ToolCall

PICTURE = base64.b64encode(b"GIF89a\x01\0\x01\0").decode()
SOUND = base64.b64encode(b"RIFF\x04\0\0\0WAVE").decode()


def read(**fields: Any) -> ResponsesRequest:
    return decode(ResponsesRequest, json.dumps({"model": "m", "input": "x", **fields}).encode())


def ask(**fields: Any) -> GenerationRequest:
    return ask_of(read(**fields), "k")


def talk(*items: dict[str, Any]) -> list[ChatMessage]:
    messages = ask(input=items).messages
    assert messages is not None
    return messages


def call(id: str, name: str = "look", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thinks(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


# ---------------------------------------------------------------- the request


def test_a_body_that_says_little_asks_for_one_whole_answer() -> None:
    asked = ask()
    assert asked.messages == [ChatMessage("user", "x")]
    assert (asked.model, asked.key, asked.stream, asked.n) == ("m", "k", False, 1)
    assert (asked.priority, asked.timeout_s, asked.session) == (0, None, "")
    assert (asked.tools, asked.tool_choice, asked.parallel, asked.template) == ([], None, True, {})
    assert asked.params.logprobs is None and asked.params.grammar is None


def test_each_parameter_has_its_own_place() -> None:
    asked = ask(
        stream=True, max_output_tokens=9, temperature=0.5, top_p=0.25, priority=-2, timeout_s=7,
        prompt_cache_key="talk", top_logprobs=3, parallel_tool_calls=True,
        reasoning={"effort": "low"},
    )  # fmt: skip
    assert (asked.stream, asked.priority, asked.timeout_s, asked.session) == (True, -2, 7, "talk")
    params = asked.params
    assert (params.max_tokens, params.temperature, params.top_p) == (9, 0.5, 0.25)
    assert (params.logprobs, asked.parallel) == (3, True)
    thinking = {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    assert asked.template == thinking


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type":"object"}', "text.format")),
        (
            {"type": "json_schema", "schema": True},
            Grammar("json_schema", "{}", "text.format"),
        ),
    ],
)
def test_the_form_of_the_text(format: Any, expected: Grammar | None) -> None:
    assert ask(text={"format": format}).params.grammar == expected


def test_a_tool_has_what_was_said_of_it_and_no_more() -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "function", "name": "g", "strict": False}]
    assert [tool["function"] for tool in ask(tools=tools).tools] == [
        {"name": "f"},
        {"name": "g", "strict": False},
    ]


@pytest.mark.parametrize("name", ["conversation", "prompt"])
def test_what_openai_keeps_and_servekit_does_not_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="send the whole conversation") as refused:
        ask(**{name: {"id": "x"}})
    assert refused.value.param == name


# ---------------------------------------------------------------- the conversation


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    assert ask(instructions="be kind").messages == [
        ChatMessage("system", "be kind"),
        ChatMessage("user", "x"),
    ]
    assert ask(instructions="").messages == [ChatMessage("user", "x")]


def test_a_developer_is_the_system() -> None:
    assert talk({"role": "developer", "content": "d"}) == [ChatMessage("system", "d")]


def test_thoughts_text_and_calls_of_a_turn_are_one_message() -> None:
    first, second = ToolCall("c1", "look", "{}"), ToolCall("c2", "look", "{}")
    assert talk(thinks("hm"), says("so"), call("c1"), call("c2")) == [
        ChatMessage("assistant", "so", tool_calls=(first, second), reasoning="hm")
    ]
    summary = [{"type": "summary_text", "text": "hm"}]
    assert talk({"type": "reasoning", "summary": summary, "content": []}, says("so")) == [
        ChatMessage("assistant", "so", reasoning="hm")
    ]
    assert talk(thinks("hm"), call("c1")) == [
        ChatMessage("assistant", "", tool_calls=(first,), reasoning="hm")
    ]


def test_a_turn_ends_where_another_begins() -> None:
    first = ToolCall("c1", "look", "{}")
    assert talk(says("a"), says("b")) == [
        ChatMessage("assistant", "a"),
        ChatMessage("assistant", "b"),
    ]
    assert talk(call("c1"), says("b")) == [
        ChatMessage("assistant", "", tool_calls=(first,)),
        ChatMessage("assistant", "b"),
    ]
    assert talk(thinks("a"), thinks("b")) == [
        ChatMessage("assistant", "", reasoning="a"),
        ChatMessage("assistant", "", reasoning="b"),
    ]
    assert talk({"role": "user", "content": "?"}, call("c1")) == [
        ChatMessage("user", "?"),
        ChatMessage("assistant", "", tool_calls=(first,)),
    ]


def test_thoughts_that_are_hidden_are_none() -> None:
    assert talk({"type": "reasoning", "id": "rs_1"}) == [ChatMessage("assistant", "")]


def test_a_result_names_the_function_that_was_called() -> None:
    result = {"type": "function_call_output", "call_id": "c2", "output": "4"}
    [_, told] = talk(call("c1"), call("c2", "see"), result)
    assert told == ChatMessage("tool", "4", "see", tool_call_id="c2")
    assert talk(result) == [ChatMessage("tool", "4", tool_call_id="c2")]
    parts = [{"type": "input_text", "text": "5"}]
    assert talk(result | {"output": parts})[0].content == "5"
    [_, told] = talk(call("c2", "first"), call("c2", "second"), result)
    assert told.name == "first"


def test_many_calls_of_a_long_conversation_take_little_time() -> None:
    """Conversations that are stored may have any number of them, and this is on the event loop."""
    items: list[Item] = []
    for at in range(40_000):
        items.append(Item(type="function_call", call_id=f"c{at}", name=f"f{at}"))
        if at % 8 == 7:
            items.append(Item(type="function_call_output", call_id=f"c{at}", output=""))
    began_s = time.process_time()
    messages = to_messages(None, items)
    assert time.process_time() - began_s < 2.0
    assert messages[-1] == ChatMessage("tool", "", "f39999", tool_call_id="c39999")
    assert sum(len(one.tool_calls) for one in messages) == 40_000


def test_all_parts_of_a_message_are_read() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}", "detail": "low"},
        {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}},
        {"type": "text", "text": "b"},
    ]
    [message] = talk({"role": "user", "content": parts})
    assert [(one.kind, one.detail) for one in message.media] == [
        ("image/gif", "low"),
        ("audio/wav", ""),
    ]
    assert [one for one in message.parts if isinstance(one, str)] == ["a", "b"]
    refusal = [{"type": "refusal", "refusal": "no"}]
    assert talk({"role": "assistant", "content": refusal}) == [ChatMessage("assistant", "no")]


@pytest.mark.parametrize("arguments", ["{", "[]", "[" * 9999])
def test_wrong_arguments_of_an_earlier_call_are_told_to_the_template(arguments: str) -> None:
    [message] = talk(call("c", arguments=arguments))
    assert json.loads(message.tool_calls[0].arguments) == {"INVALID_JSON": arguments}


def test_a_file_of_text_is_read_after_its_name() -> None:
    part = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,w6Q="}
    [message] = talk({"role": "user", "content": [part, {"type": "input_text", "text": "?"}]})
    assert message.content == "a.txt\nä\n?"


@pytest.mark.parametrize(
    ("item", "param", "said"),
    [
        ({"content": "x"}, "input[1].role", "is required"),
        ({"role": "user"}, "input[1].content", "is required"),
        ({"type": "web_search_call"}, "input[1]", "no items of type 'web_search_call'"),
        ({"type": "function_call", "name": "f"}, "input[1]", "name and call_id are required"),
        ({"type": "function_call", "call_id": "c"}, "input[1]", "name and call_id are required"),
        ({"type": "function_call_output", "call_id": "c"}, "input[1]", "output are required"),
        ({"type": "function_call_output", "output": "x"}, "input[1]", "output are required"),
        (
            {"role": "user", "content": [{"type": "input_text"}]},
            "input[1].content[0]",
            "a part of type input_text needs `text`",
        ),
        (
            {"role": "user", "content": [{"type": "input_file"}]},
            "input[1].content[0]",
            "a file needs `file_data`",
        ),
        (
            {"role": "user", "content": [{"type": "input_image"}]},
            "input[1].content[0]",
            "an image needs `image_url`",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "input[1].content[0].input_audio",
            "is required",
        ),
    ],
)
def test_a_wrong_item_is_named_by_its_place(item: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        talk({"role": "user", "content": "x"}, item)
    assert refused.value.param == param
    assert refused.value.message.startswith("input[1]") and said in refused.value.message


def test_items_of_earlier_responses_do_not_shift_the_places_of_the_inputs() -> None:
    earlier = items_of(read(input=[says("a"), says("b")]))
    wrong = items_of(read(input=[says("c"), {"role": "user"}]))
    with pytest.raises(RequestError) as refused:
        to_messages(None, [*earlier, *wrong], before=2)
    assert refused.value.param == "input[1].content"
