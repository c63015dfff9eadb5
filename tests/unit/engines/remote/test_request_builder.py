"""What an endpoint is asked, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from servekit.engines.remote.request_builder import EndpointTraits, build_call
from servekit.errors import Unsupported
from servekit.protocol.messages import (
    UNKNOWN_TOKEN,
    ChatMessage,
    Generate,
    Grammar,
    SamplingParams,
    ToolCall,
)

MANNER = EndpointTraits("kimi", {})
USER = [ChatMessage("user", "Hello")]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("f", "g")
]


def body(
    manner: EndpointTraits = MANNER, params: SamplingParams | None = None, **fields: Any
) -> dict[str, Any]:
    fields.setdefault("messages", USER)
    found: dict[str, Any] = json.loads(
        build_call(Generate(1, params or SamplingParams(), **fields), manner).body
    )
    return found


def test_a_plain_chat_says_nothing_that_was_not_said() -> None:
    assert body() == {
        "model": "kimi",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_trace_that_a_request_is_of_goes_on() -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    request = Generate(1, SamplingParams(), messages=USER, trace=parent)
    assert build_call(request, MANNER).headers["traceparent"] == parent
    untraced = build_call(Generate(1, SamplingParams(), messages=USER), MANNER)
    assert "traceparent" not in untraced.headers


def test_a_conversation_goes_as_it_is() -> None:
    call = ToolCall("call_1", "f", '{"a": 1}')
    told = body(
        messages=[
            ChatMessage("system", "Be kind."),
            ChatMessage("user", "Hi", name="ann"),
            ChatMessage("assistant", "", tool_calls=(call,), reasoning="hm"),
            ChatMessage("tool", "2", tool_call_id="call_1"),
        ]
    )["messages"]
    assert told[1] == {"role": "user", "content": "Hi", "name": "ann"}
    assert told[2] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
        "reasoning_content": "hm",
    }
    assert told[3] == {"role": "tool", "content": "2", "tool_call_id": "call_1"}


def test_sampling_by_its_own_names() -> None:
    params = SamplingParams(
        max_tokens=5, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, seed=-7,
        presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=1.1, stop=("a", "b"),
        ignore_eos=True, min_tokens=2, logit_bias=((7, -1.5),), logprobs=3,
    )  # fmt: skip
    assert body(params=params).items() >= {
        "max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": -7,
        "presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.1,
        "stop": ["a", "b"], "ignore_eos": True, "min_tokens": 2, "logit_bias": {"7": -1.5},
        "logprobs": True, "top_logprobs": 3,
    }.items()  # fmt: skip


def test_the_file_s_sampling_where_the_request_is_silent() -> None:
    manner = EndpointTraits("kimi", {"temperature": 0.3, "top_p": 0.9, "max_tokens": 100})
    told = body(manner, SamplingParams(temperature=0.0))
    assert (told["temperature"], told["top_p"], told["max_tokens"]) == (0.0, 0.9, 100)


def test_what_is_off_is_not_said() -> None:
    params = SamplingParams(top_k=0, min_p=0.0, repetition_penalty=1.0)
    assert body(params=params) == body()


def test_as_openai_s_newer_models_want_it_and_without_counts() -> None:
    manner = EndpointTraits("o", {}, usage=False, limit="max_completion_tokens")
    told = body(manner, SamplingParams(max_tokens=9))
    assert told["max_completion_tokens"] == 9
    assert not {"max_tokens", "stream_options"} & told.keys()
    plain = body(manner, SamplingParams(max_tokens=9), messages=None, prompt="x")
    assert plain["max_tokens"] == 9


def test_a_plain_completion() -> None:
    task = build_call(Generate(1, SamplingParams(logprobs=2), prompt="Once"), MANNER)
    told = json.loads(task.body)
    assert task.path == "/completions"
    assert (told["prompt"], told["logprobs"]) == ("Once", 2)
    assert "top_logprobs" not in told


def test_embeddings() -> None:
    request = Generate(1, SamplingParams(), task="embed", inputs=["a", "b"])
    task = build_call(request, MANNER)
    assert task.path == "/embeddings"
    assert json.loads(task.body) == {
        "model": "kimi",
        "input": ["a", "b"],
        "encoding_format": "float",
    }


@pytest.mark.parametrize(
    ("tools", "must", "one", "expected"),
    [
        (TOOLS, False, False, {}),
        (TOOLS, True, False, {"tool_choice": "required"}),
        (TOOLS, False, True, {"parallel_tool_calls": False}),
        (TOOLS, True, True, {"tool_choice": "required", "parallel_tool_calls": False}),
        (TOOLS[:1], True, False, {"tool_choice": "required"}),
        (TOOLS[:1], True, True, {
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        }),
    ],
)  # fmt: skip
def test_tools(tools: list[dict[str, Any]], must: bool, one: bool, expected: Any) -> None:
    told = body(tools=tools, must_call=must, one_call=one)
    assert told.pop("tools") == tools
    assert told == body() | expected


def test_an_answer_by_a_schema_is_strict() -> None:
    grammar = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}')
    told = body(params=SamplingParams(grammar=grammar))["response_format"]
    assert told["json_schema"]["schema"] == json.loads(grammar.text)
    assert (told["type"], told["json_schema"]["strict"]) == ("json_schema", True)
    loose = body(params=SamplingParams(grammar=Grammar("json_schema", '{"type":"object"}')))
    assert loose["response_format"] == {"type": "json_object"}


def test_what_has_no_form_there_is_refused() -> None:
    with pytest.raises(Unsupported, match="JSON schemas only"):
        body(params=SamplingParams(grammar=Grammar("regex", "a+")))
    with pytest.raises(Unsupported, match="'tone' can be passed on only"):
        body(template={"tone": "kind"})


def test_thinking_as_the_endpoint_knows_it() -> None:
    wish = {"enable_thinking": True, "thinking": True, "thinking_budget": 9}
    assert body(template=wish) == body()
    assert body(template=wish | {"reasoning_effort": "low"}) == body() | {"reasoning_effort": "low"}
    templated = EndpointTraits("qwen", {}, template_arguments=True)
    told = body(templated, template=wish | {"reasoning_effort": "low", "tone": "kind"})
    assert told["chat_template_kwargs"] == wish | {"tone": "kind"}
    assert told["reasoning_effort"] == "low"


def test_an_answer_that_has_begun() -> None:
    told = body(continues=True)
    assert (told["continue_final_message"], told["add_generation_prompt"]) == (True, False)


def test_an_answer_of_another_worker_goes_on() -> None:
    begun: dict[str, Any] = {"answered": "One, two, ", "emitted": [UNKNOWN_TOKEN] * 4}
    params = SamplingParams(max_tokens=10, min_tokens=6)
    told = body(params=params, **begun)
    assert told["messages"][1:] == [{"role": "assistant", "content": "One, two,"}]
    assert (told["continue_final_message"], told["add_generation_prompt"]) == (True, False)
    assert (told["max_tokens"], told["min_tokens"]) == (6, 2)
    plain = body(params=params, messages=None, prompt="Count: ", **begun)
    assert (plain["prompt"], plain["max_tokens"]) == ("Count: One, two,", 6)


def test_a_client_s_beginning_is_a_part_of_it() -> None:
    messages = [*USER, ChatMessage("assistant", "One,")]
    told = body(messages=messages, continues=True, answered=" two", emitted=[UNKNOWN_TOKEN])
    assert told["messages"][1:] == [{"role": "assistant", "content": "One, two"}]
