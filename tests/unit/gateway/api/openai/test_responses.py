"""OpenAI's Responses over a real router, an echo worker, and ASGI as uvicorn speaks it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import RequestError
from servekit.gateway.api.openai.responses import Responses
from servekit.gateway.api.openai.responses_schema import ResponsesRequest, ask_of
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.http.asgi import encode_error
from servekit.gateway.http.response import asgi_endpoint
from servekit.protocol.messages import ChatMessage, Grammar, ToolCall
from tests.unit.gateway.api.openai.test_response import speaking
from tests.unit.gateway.conftest import Service

COUNT = "/v1/responses/input_tokens"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


async def post(service: Service, **body: Any) -> httpx.Response:
    return await post_to(service, "/v1/responses", body)


async def post_to(service: Service, path: str, body: dict[str, Any]) -> httpx.Response:
    handler = Responses(service.router).handlers[path]
    route = asgi_endpoint(handler, 10**6, encode_error)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=route)) as client:
        return await client.post(f"http://servekit{path}", json={"model": "m", **body})


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_whole_response(service: Service) -> None:
    await service.up()
    body = (await post(service, input="hello", max_output_tokens=5, metadata={"a": "b"})).json()
    assert (body["object"], body["status"]) == ("response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    [message] = body["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"][0]["text"] == "hello"
    assert body["usage"]["total_tokens"] == 10
    assert body["metadata"] == {"a": "b"}


async def test_the_tokens_of_a_prompt_are_counted(service: Service) -> None:
    await speaking(service)
    asked: dict[str, Any] = {"input": [{"role": "user", "content": "hello"}], "tools": [LOOK]}
    used = (await post(service, **asked, max_output_tokens=1)).json()["usage"]
    more: dict[str, Any]
    for more in ({}, {"truncation": "auto", "text": {"verbosity": "low"}}):
        counted = await post_to(service, COUNT, asked | more)
        told = {"object": "response.input_tokens", "input_tokens": used["input_tokens"]}
        assert (counted.status_code, counted.json()) == (200, told)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1_0"}]}, "input[0]"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "tools": [LOOK], "tool_choice": "look_up"}, "tool_choice"),
    ],
)
async def test_what_cannot_be_counted_is_refused(
    service: Service, fields: dict[str, Any], param: str
) -> None:
    await speaking(service)
    refused = await post_to(service, COUNT, fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


async def test_thoughts_text_and_calls_are_items_of_their_own(service: Service) -> None:
    await speaking(service)
    text = f"<think>hm</think>so {CALL}"
    body = (await post(service, input=text, max_output_tokens=len(text), tools=[LOOK])).json()
    kinds = [item["type"] for item in body["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    assert body["output"][0]["content"][0]["text"] == "hm"
    assert body["output"][1]["content"][0]["text"].strip() == "so"
    call = body["output"][2]
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": 1})
    assert [item["status"] for item in body["output"]] == ["completed", "completed", "incomplete"]


async def test_the_stream_builds_what_the_whole_is(service: Service) -> None:
    await speaking(service, step_s=0.0005)
    text = f"<think>hm</think>so {CALL}{CALL}"
    asked = {"input": text, "max_output_tokens": len(text), "tools": [LOOK]}
    events = events_of(await post(service, **asked, stream=True))
    whole = (await post(service, **asked)).json()
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.incomplete"
    built = events[-1]["response"]["output"]

    def shape(items: list[dict[str, Any]]) -> list[Any]:
        return [(i["type"], i.get("content"), i.get("name"), i.get("arguments")) for i in items]

    assert shape(built) == shape(whole["output"])
    assert events[-1]["response"]["usage"] == whole["usage"]
    assert built == [e["item"] for e in events if e["type"] == "response.output_item.done"]
    for index, item in enumerate(built):
        deltas = "".join(
            event["delta"]
            for event in events
            if event["type"].endswith(".delta") and event["output_index"] == index
        )
        said = item["content"][0]["text"] if "content" in item else item["arguments"]
        assert deltas == said
        assert {
            e["item_id"] for e in events if e.get("output_index") == index and "item_id" in e
        } == {item["id"]}


async def test_an_empty_answer_has_a_message_all_the_same(service: Service) -> None:
    await speaking(service)
    text = "<think>hm</think>"
    asked = {"input": text, "max_output_tokens": len(text)}
    body = (await post(service, **asked)).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "message"]


def ask(**body: Any) -> Any:
    data = msgspec.json.encode({"model": "m", "input": "x", **body})
    return ask_of(decode(ResponsesRequest, data), "")


def test_a_conversation_becomes_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":1}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]  # fmt: skip
    calls = (ToolCall("c1", "look", '{"at":1}'), ToolCall("c2", "look", "{}"))
    assert ask(input=items, instructions="be kind").messages == [
        ChatMessage("system", "be kind"),
        ChatMessage("user", "a"),
        ChatMessage("assistant", "b", tool_calls=calls, reasoning="t"),
        ChatMessage("tool", "d", "look", tool_call_id="c1"),
        ChatMessage("assistant", "e"),
        ChatMessage("assistant", "f"),
    ]


def test_parameters_become_our_own() -> None:
    asked = ask(
        tools=[{**LOOK, "strict": True, "description": "d"}],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}}},
        temperature=0.5,
        include=["message.output_text.logprobs"],
    )
    function = {"name": "look", "description": "d", "parameters": {"type": "object"}}
    assert asked.tools == [{"type": "function", "function": {**function, "strict": True}}]
    assert asked.tool_choice == {"type": "function", "name": "look"}
    assert not asked.parallel
    assert asked.template["enable_thinking"] is False
    assert asked.params.grammar == Grammar("json_schema", '{"type":"null"}', "text.format")
    assert (asked.params.temperature, asked.params.logprobs) == (0.5, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        ask(**fields)
    assert refused.value.param == param
    assert refused.value.status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e300, 1e300) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(ResponsesRequest.__struct_fields__), json_values)
def test_no_value_of_any_field_is_worse_than_a_refusal(field: str, value: Any) -> None:
    try:
        ask(**{field: value})
    except RequestError as error:
        assert error.status == 400
        assert error.message
