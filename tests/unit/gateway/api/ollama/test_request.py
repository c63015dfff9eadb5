"""What the fields of Ollama's bodies become, and the sentences for those that are not served."""

from __future__ import annotations

import base64
import json
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.ollama.request import (
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    check_generate,
    generate_messages,
    messages,
    sampling,
    template,
)
from servekit.gateway.api.openai.schema import decode
from servekit.protocol.messages import (
    ChatMessage,
    Dialect,
    Grammar,
    ModelInfo,
    SamplingParams,
    ToolCall,
)

Body = TypeVar("Body", ChatRequest, GenerateRequest, EmbedRequest)
INFO = ModelInfo(100, 1, True, "a", "float32", "cpu")
PICTURE = b"GIF89a\x01\0\x01\0"
ENCODED = base64.b64encode(PICTURE).decode()


def read(kind: type[Body], **fields: Any) -> Body:
    return decode(kind, json.dumps({"model": "m", **fields}).encode())


def options(**given: Any) -> SamplingParams:
    return sampling(read(ChatRequest, options=given))


def talk(*given: dict[str, Any]) -> list[ChatMessage]:
    listed = read(ChatRequest, messages=given).messages
    assert listed is not None
    return messages(listed)


# ---------------------------------------------------------------- sampling


def test_what_is_not_said_is_left_to_the_model() -> None:
    assert sampling(read(ChatRequest)) == options() == SamplingParams(clamp=True)
    assert options(num_ctx=4096, num_gpu=99, penalize_newline=True) == SamplingParams(clamp=True)


def test_each_option_has_its_own_place() -> None:
    params = options(
        num_predict=9.0, temperature=0.5, top_p=0.25, top_k=7.0, min_p=0.125, seed=3.0,
        presence_penalty=1.5, frequency_penalty=-1.5, repeat_penalty=1.25, stop=["x", "y"],
    )  # fmt: skip
    assert params == SamplingParams(
        9, 0.5, 0.25, 7, 0.125, 3, 1.5, -1.5, 1.25, ("x", "y"), clamp=True
    )
    assert type(params.max_tokens) is type(params.top_k) is type(params.seed) is int
    assert options(stop="x").stop == ("x",)


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_without_a_limit_the_answer_may_be_as_long_as_fits(limit: int) -> None:
    assert options(num_predict=limit).max_tokens is None
    assert options(num_predict=1).max_tokens == 1


def test_all_tokens_are_sampled_from_where_their_number_is_no_number() -> None:
    assert options(top_k=-1).top_k == 0


def test_a_penalty_over_no_tokens_is_none() -> None:
    assert options(repeat_penalty=1.5, repeat_last_n=0).repetition_penalty == 1.0
    assert options(repeat_penalty=1.5, repeat_last_n=64).repetition_penalty == 1.5
    assert options(repeat_penalty=1.5).repetition_penalty == 1.5


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"num_predict": 1.5}, "options.num_predict", "expected a whole number"),
        ({"top_k": 2**31}, "options.top_k", "is out of range"),
        ({"num_predict": -(2**31) - 1}, "options.num_predict", "is out of range"),
        ({"seed": 2**63}, "options.seed", "is out of range"),
        ({"mirostat": 1}, "options.mirostat", "is not supported; leave it out"),
        ({"tfs_z": 0.5}, "options.tfs_z", "is not supported; leave it out"),
        ({"typical_p": 2}, "options.typical_p", "is not supported; leave it out"),
    ],
)
def test_an_option_that_cannot_be_had_is_refused_by_name(
    given: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        options(**given)
    assert refused.value.param == param
    assert refused.value.message.startswith(param) and said in refused.value.message


def test_the_largest_numbers_and_options_that_are_off_are_taken() -> None:
    params = options(seed=-(2**63), top_k=2**31 - 1, mirostat=0, tfs_z=1, typical_p=0)
    assert (params.seed, params.top_k) == (-(2**63), 2**31 - 1)


def test_log_probabilities_are_told_only_where_they_were_asked_for() -> None:
    assert sampling(read(ChatRequest, top_logprobs=3)).logprobs is None
    assert sampling(read(ChatRequest, logprobs=True)).logprobs == 0
    assert sampling(read(ChatRequest, logprobs=True, top_logprobs=3)).logprobs == 3


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (None, None),
        ("", None),
        ("json", Grammar("json_schema", '{"type":"object"}')),
        ({"type": "array"}, Grammar("json_schema", '{"type":"array"}')),
        ({}, Grammar("json_schema", "{}")),
    ],
)
def test_the_form_of_an_answer(format: Any, expected: Grammar | None) -> None:
    assert sampling(read(GenerateRequest, format=format)).grammar == expected


def test_another_form_is_refused() -> None:
    with pytest.raises(RequestError, match='format: expected "json" or a JSON schema') as refused:
        sampling(read(ChatRequest, format="xml"))
    assert refused.value.param == "format"


# ---------------------------------------------------------------- thinking

THINKS = replace(INFO, dialect=Dialect(think_begin="<think>", think_end="</think>"))
HARMONY = replace(INFO, dialect=Dialect("harmony"))
ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("think", "info", "expected"),
    [
        (None, INFO, {}),
        (True, THINKS, ON),
        (True, HARMONY, ON),
        (True, None, ON),  # it is not known yet what the model can do
        (False, THINKS, OFF),
        (False, INFO, OFF),
        ("low", THINKS, ON | {"reasoning_effort": "low"}),
    ],
)
def test_thinking_is_told_to_the_template(think: Any, info: Any, expected: dict[str, Any]) -> None:
    assert template(think, "m", info) == expected


@pytest.mark.parametrize("think", [True, "high"])
def test_a_model_that_does_not_think_is_not_made_to(think: Any) -> None:
    with pytest.raises(Unsupported, match="think: the model 'm' does not think"):
        template(think, "m", INFO)


# ---------------------------------------------------------------- messages


def call(name: str, id: str = "", **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}} | ({"id": id} if id else {})


def asks(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [*calls]}


def answers(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **fields}


def answered(*given: dict[str, Any]) -> list[tuple[str | None, str | None]]:
    """The names and ids of the calls that messages of tools answer."""
    return [(one.name, one.tool_call_id) for one in talk(*given) if one.role == "tool"]


def test_a_conversation_becomes_messages() -> None:
    assert talk(
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "thinking": "hm"},
        {"role": "assistant"},
    ) == [
        ChatMessage("system", "be good"),
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "so", reasoning="hm"),
        ChatMessage("assistant", ""),
    ]


def test_a_call_without_an_id_gets_one_that_every_template_takes() -> None:
    [message] = talk(asks(call("look", at=1), call("see", "c1")))
    assert message.tool_calls == (
        ToolCall("call_000000000", "look", '{"at":1}'),
        ToolCall("c1", "see", "{}"),
    )
    [made, _] = message.tool_calls
    assert len(made.id) == len("call_") + 9


def test_an_answer_belongs_to_the_call_that_it_names() -> None:
    both = asks(call("look", "c1"), call("look", "c2"), call("see", "c3"))
    # by its id, else the first call of that tool that has no answer
    assert answered(both, answers("a", tool_call_id="c2"), answers("b", tool_name="look")) == [
        ("look", "c2"),
        ("look", "c1"),
    ]
    assert answered(both, answers("a", tool_name="see"), answers("b", tool_name="look")) == [
        ("see", "c3"),
        ("look", "c1"),
    ]


def test_an_answer_that_names_nothing_belongs_to_the_first_call_without_one() -> None:
    both = asks(call("look", "c1"), call("see", "c2"))
    assert answered(both, answers("a"), answers("b"), answers("c")) == [
        ("look", "c1"),
        ("see", "c2"),
        (None, None),
    ]


def test_an_answer_to_no_call_keeps_what_it_says() -> None:
    one = asks(call("look", "c1"))
    assert answered(one, answers("a", tool_name="see")) == [("see", None)]
    assert answered(one, answers("a", tool_call_id="c9")) == [(None, "c9")]
    twice = answers("a", tool_name="look")
    assert answered(one, twice, twice) == [("look", "c1"), ("look", None)]


def test_the_arguments_of_an_earlier_call_are_an_object() -> None:
    wrong = {"function": {"name": "look", "arguments": '{"at": 1}'}}
    with pytest.raises(RequestError) as refused:
        talk({"role": "user", "content": "hi"}, asks(call("see"), wrong))
    where = "messages[1].tool_calls[1].function.arguments"
    assert (refused.value.message, refused.value.param) == (f"{where}: expected an object", where)


@pytest.mark.parametrize("image", [ENCODED, f"data:image/png;base64,{ENCODED}"])
def test_an_image_is_base64_or_an_address_with_it(image: str) -> None:
    [message] = talk({"role": "user", "content": "what?", "images": [image]})
    assert [(one.data, one.kind, one.at) for one in message.media] == [(PICTURE, "image/gif", 0)]
    assert message.content == "what?"


def test_a_wrong_image_is_named_by_its_place() -> None:
    with pytest.raises(RequestError) as refused:
        talk({"role": "user", "images": [ENCODED, "%%%"]})
    assert refused.value.param == "messages[0].images[1]"


# ---------------------------------------------------------------- /api/generate


def test_a_prompt_becomes_a_conversation() -> None:
    assert generate_messages(read(GenerateRequest, prompt="hi")) == [ChatMessage("user", "hi")]
    assert generate_messages(read(GenerateRequest, prompt="hi", system="be good")) == [
        ChatMessage("system", "be good"),
        ChatMessage("user", "hi"),
    ]
    [seen] = generate_messages(read(GenerateRequest, images=[ENCODED], system=""))
    assert (seen.content, len(seen.media)) == ("", 1)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"suffix": "x"}, "suffix", "suffix is not supported; leave it out"),
        ({"template": "x"}, "template", "the model's own is used; raw: true goes without"),
        ({"context": [1]}, "context", "use /api/chat for a conversation"),
        ({"raw": True, "system": "x"}, "raw", "the prompt is taken as it is, without `system`"),
        ({"raw": True, "images": [ENCODED]}, "raw", "raw: images need the chat template"),
    ],
)
def test_what_a_generation_cannot_have_is_refused_by_name(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        check_generate(read(GenerateRequest, **fields))
    assert refused.value.param == param
    assert said in refused.value.message


def test_empty_parameters_that_clients_always_send_are_taken() -> None:
    empty = {"suffix": "", "template": "", "context": [], "system": "", "images": []}
    check_generate(read(GenerateRequest, **empty, raw=True))
    check_generate(read(GenerateRequest, system="x", images=[ENCODED]))
