"""Request bodies: what is taken, and the sentence for what is not."""

from __future__ import annotations

import gzip
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import RequestError
from servekit.gateway.api.openai.request import (
    chat_messages,
    chat_sampling,
    completion_prompts,
    completion_sampling,
    continues,
    sampling,
    template_arguments,
)
from servekit.gateway.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    decode,
    unserved_fields,
)
from servekit.protocol.messages import ChatMessage, SamplingParams

USER = {"role": "user", "content": "hi"}


HALF_A_CALL = {"function": {"name": "f", "arguments": "["}}


def chat(**fields: Any) -> ChatRequest:
    return decode(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def take_chat(request: ChatRequest) -> None:
    """All that is read from a body."""
    chat_messages(request.messages)
    chat_sampling(request)
    continues(request)
    template_arguments(request)


def refused(body: bytes | dict[str, Any], kind: Any = CompletionRequest) -> RequestError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(RequestError) as error:
        request = decode(kind, data)
        if kind is ChatRequest:
            take_chat(request)
        else:
            completion_prompts(request)
            completion_sampling(request)
    assert error.value.status == 400
    return error.value


def test_what_is_not_said_is_left_to_the_model() -> None:
    assert sampling(chat()) == SamplingParams()
    everything_null = dict.fromkeys(unserved_fields(ChatRequest)) | {
        "temperature": None,
        "stop": None,
    }
    assert sampling(chat(**everything_null, stream=None)) == SamplingParams()


def test_what_is_said_arrives() -> None:
    params = sampling(
        chat(temperature=0, top_p=0.5, top_k=-1, seed=-3, stop="x", max_completion_tokens=7)
    )
    expected = SamplingParams(7, 0.0, 0.5, 0, seed=-3, stop=("x",))
    assert params == expected
    assert sampling(chat(stop=["a", "b"])).stop == ("a", "b")


def test_a_plain_completion_has_openais_default_length() -> None:
    body = json.dumps({"model": "m", "prompt": [1, 2]}).encode()
    assert completion_sampling(decode(CompletionRequest, body)).max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        ([""], [""]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2]], [[1], [2]]),
    ],
)
def test_prompts_come_alone_or_in_a_list(prompt: Any, taken: Any) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    assert completion_prompts(decode(CompletionRequest, body)) == taken


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"messages": [{**USER, "role": "robot"}]},
            "messages[0].role: 'robot' is not one of: assistant, developer, function, system,",
        ),
        (
            {"response_format": {"type": "xml"}},
            "'xml' is not one of: json_object, json_schema, text",
        ),
        (
            {"reasoning_effort": "most"},
            "reasoning_effort: 'most' is not one of: high, low, medium,",
        ),
    ],
)
def test_a_wrong_word_is_answered_with_those_that_there_are(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError) as error:
        chat(**fields)
    assert said in error.value.message and "None" not in error.value.message


def test_message_parts_and_roles() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": "d"}, {**USER, "content": parts}])
    assert chat_messages(request.messages) == [
        ChatMessage("system", "d"),
        ChatMessage("user", "a\nb"),
    ]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b"{", None, "not valid JSON"),
        (b"\xff\xfe", None, "the body is not valid UTF-8"),
        (b"", None, "the body is empty; send a JSON object"),
        (gzip.compress(b"{}", mtime=0), None, "the body is compressed (gzip); send it as it is"),
        (b"\x28\xb5\x2f\xfd\x00", None, "the body is compressed (zstd); send it as it is"),
        (b"\xef\xbb\xbf{}", None, "the body begins with a byte order mark; leave it out"),
        (b'{"model":"m","prompt":"\xff"}', None, "the body is not valid UTF-8"),
        (b'"text"', None, "the body: expected `object`"),
        (b'{"x":' + b"[" * 1_000_000, None, "nested too deeply"),
        (b'{"model":"m","prompt":"a","seed":NaN}', None, "not valid JSON"),
        (b'{"model":"m","prompt":"a","temperature":1e999}', "temperature", "temperature"),
        (b'{"model":"m","prompt":"a","seed":99999999999999999999}', "seed", "seed"),
        ({"model": "m"}, "prompt", "prompt is required"),
        ({"model": 3, "prompt": "a"}, "model", "expected `str`"),
        ({"model": "m", "prompt": "a", "max_tokens": "9"}, "max_tokens", "expected `int`, got"),
        ({"model": "m", "prompt": "a", "max_tokens": -1}, "max_tokens", ">= 0"),
        ({"model": "m", "prompt": "a", "max_tokens": True}, "max_tokens", "expected `int"),
        ({"model": "m", "prompt": "a", "temperature": 2.1}, "temperature", "<= 2.0"),
        ({"model": "m", "prompt": "a", "temperature": -1}, "temperature", ">= 0.0"),
        ({"model": "m", "prompt": "a", "top_p": 0}, "top_p", "> 0.0"),
        ({"model": "m", "prompt": "a", "stop": ""}, "stop", ">= 1"),
        ({"model": "m", "prompt": "a", "stop": ["x"] * 100}, "stop", "<= 32"),
        ({"model": "m", "prompt": [], "stop": None}, "prompt", "length >= 1"),
        ({"model": "m", "prompt": [1, "a"]}, "prompt", "mixed"),
        ({"model": "m", "prompt": ["a"] * 70, "n": 2}, "prompt", "over the limit of 128"),
        ({"model": "m", "prompt": [[]]}, "prompt", "at least one"),
        ({"model": "m", "prompt": [1.5]}, "prompt", "expected"),
        ({"model": "m", "prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens", "over"),
        ({"model": "m", "prompt": "a", "min_tokens": 17}, "min_tokens", "over the limit of 16"),
        ({"model": "m", "prompt": "a", "n": 0}, "n", ">= 1"),
        ({"model": "m", "prompt": "a", "n": True}, "n", "expected `int"),
        ({"model": "m", "prompt": "a", "logprobs": 21}, "logprobs", "<= 20"),
        ({"model": "m", "prompt": "a", "best_of": 2}, "best_of", "request n choices"),
        ({"model": "m", "prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
        ({"model": "m", "prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "<= 100"),
    ],
)
def test_refusals_name_the_field(
    body: bytes | dict[str, Any], param: str | None, said: str
) -> None:
    error = refused(body)
    assert said in error.message
    assert (error.param or "").split("[")[0] == (param or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{**USER, "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [USER], "tools": {}}, "tools"),
        ({"messages": [USER], "functions": [{"name": "f"}]}, "functions"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        (
            {"messages": [USER], "response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [USER], "max_completion_tokens": 1, "min_tokens": 2}, "min_tokens"),
    ],
)
def test_chat_refusals_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused({"model": "m", **fields}, ChatRequest)
    assert error.param == param


def test_what_asks_for_nothing_is_taken() -> None:
    chat(n=1, tools=[], tool_choice="auto", response_format={"type": "text"}, logprobs=False)
    chat(logit_bias={}, modalities=["text"], user="me", metadata={"unknown": "is ignored"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(ChatRequest.__struct_fields__), json_values)
def test_no_value_of_any_field_is_worse_than_a_refusal(field: str, value: Any) -> None:
    if isinstance(value, float) and math.isinf(value):
        value = 1e300
    body = msgspec.json.encode({"model": "m", "messages": [USER], field: value})
    try:
        request = decode(ChatRequest, body)
        take_chat(request)
    except RequestError as error:
        assert error.status == 400
        assert error.message


@given(st.binary(max_size=60))
def test_no_bytes_are_worse_than_a_refusal(body: bytes) -> None:
    with pytest.raises(RequestError):
        decode(ChatRequest, body)


def test_best_of_is_taken_where_it_is_n() -> None:
    body = {"model": "m", "prompt": "a", "n": 3, "best_of": 3}
    assert completion_prompts(decode(CompletionRequest, json.dumps(body).encode())) == ["a"]
    assert "best_of is 4, and n is 3" in refused(body | {"best_of": 4}).message
