"""What the fields of OpenAI's bodies become: sampling parameters, grammars, prompts and messages.

`test_schema.py` has the refusals of what is no valid field.
"""

from __future__ import annotations

import base64
import json
import re
import time
from typing import Any

import pytest
from llguidance.gbnf_to_lark import is_lark_syntax

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.openai.generation_request import chat_request, completion_request
from servekit.gateway.api.openai.request import (
    MAX_CHOICES,
    MAX_GBNF_CHARS,
    chat_messages,
    chat_sampling,
    check_prompt_logprobs,
    completion_prompts,
    completion_sampling,
    constraint,
    continues,
    sampling,
    template_arguments,
)
from servekit.gateway.api.openai.schema import ChatRequest, CompletionRequest, decode
from servekit.gateway.generation.generation import GenerationRequest
from servekit.protocol.messages import ChatMessage, Grammar, Media, SamplingParams, ToolCall

USER = {"role": "user", "content": "hi"}
SOUND = b"RIFF\x04\0\0\0WAVE"
PICTURE = b"GIF89a\x01\0\x01\0"
OBJECT = {"type": "object"}


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def chat(**fields: Any) -> ChatRequest:
    return decode(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "a", **fields}
    return decode(CompletionRequest, json.dumps(body).encode())


def message(**fields: Any) -> ChatMessage:
    [made] = chat_messages(chat(messages=[{"role": "user", **fields}]).messages)
    return made


# ---------------------------------------------------------------- sampling


def test_each_sampling_parameter_has_its_own_place() -> None:
    asked = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 3,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "stop": ["x", "y"],
        "ignore_eos": True,
        "min_tokens": 2,
        "logit_bias": {"12": 5, "3": -1},
    }
    assert sampling(completion(**asked)) == SamplingParams(
        9, 0.5, 0.25, 7, 0.125, 3, 1.5, -1.5, 1.25, ("x", "y"), True, 2, ((3, -1.0), (12, 5.0))
    )  # fmt: skip


def test_the_newer_name_of_the_limit_takes_precedence() -> None:
    assert sampling(chat(max_tokens=5)).max_tokens == 5
    assert sampling(chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7


def test_the_least_number_of_tokens_may_be_the_limit_itself() -> None:
    assert sampling(chat(max_tokens=5, min_tokens=5)).min_tokens == 5
    assert completion_sampling(completion(min_tokens=16)).min_tokens == 16
    assert completion_sampling(completion(max_tokens=17, min_tokens=17)).max_tokens == 17
    with pytest.raises(RequestError, match="min_tokens is 6, over the limit of 5 tokens"):
        sampling(chat(max_tokens=5, min_tokens=6))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop_token_ids": [1, 2]}, SamplingParams(stop_token_ids=(1, 2))),
        ({"bad_words": ["x"]}, SamplingParams(bad_words=("x",))),
        ({"truncate_prompt_tokens": -1}, SamplingParams(truncate_prompt=-1)),
        ({"include_stop_str_in_output": True}, SamplingParams(include_stop=True)),
        (
            {"stop_token_ids": [1], "bad_words": ["x"], "seed": 4},
            SamplingParams(seed=4, stop_token_ids=(1,), bad_words=("x",)),
        ),
        ({"stop_token_ids": [], "bad_words": [], "truncate_prompt_tokens": 0}, SamplingParams()),
    ],
)
def test_vllms_rare_parameters_arrive_alone_and_together(
    fields: dict[str, Any], expected: SamplingParams
) -> None:
    assert sampling(chat(**fields)) == expected


@pytest.mark.parametrize("token", ["-1", "1.5", "²", "٣", "", str(2**31)])
def test_a_bias_is_for_token_ids_only(token: str) -> None:
    with pytest.raises(RequestError, match="is not a token id; /tokenize returns them") as refused:
        sampling(chat(logit_bias={token: 1}))
    assert refused.value.param == "logit_bias"
    assert sampling(chat(logit_bias={str(2**31 - 1): 1})).logit_bias == ((2**31 - 1, 1.0),)


def test_a_chat_has_log_probabilities_of_its_tokens_and_of_alternatives() -> None:
    assert chat_sampling(chat()).logprobs is None
    assert chat_sampling(chat(logprobs=True)).logprobs == 0
    assert chat_sampling(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert chat_sampling(chat(prompt_logprobs=0)).prompt_logprobs == 0
    with pytest.raises(RequestError, match="top_logprobs needs logprobs: true"):
        chat_sampling(chat(top_logprobs=1))


@pytest.mark.parametrize(
    ("fields", "prompt_logprobs", "echo"),
    [
        # the gateway knows a text, and echoes it by itself
        ({"echo": True}, None, False),
        ({"echo": True, "prompt": ["a", "b"]}, None, False),
        # it does not know the text of token ids, or what a cut leaves
        ({"echo": True, "prompt": [1, 2]}, None, True),
        ({"echo": True, "prompt": [[1], [2]]}, None, True),
        ({"echo": True, "truncate_prompt_tokens": 2}, None, True),
        # an echoed prompt gets as many log probabilities as the answer
        ({"echo": True, "logprobs": 2}, 2, True),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5, True),
        ({"echo": True, "logprobs": 4, "prompt_logprobs": 0}, 4, True),
        ({"logprobs": 2}, None, False),
        ({"logprobs": 2, "prompt_logprobs": 0}, 0, False),
    ],
)
def test_the_worker_tells_of_a_prompt_what_the_gateway_does_not_know(
    fields: dict[str, Any], prompt_logprobs: int | None, echo: bool
) -> None:
    params = completion_sampling(completion(**fields))
    assert (params.prompt_logprobs, params.echo) == (prompt_logprobs, echo)
    assert params.logprobs == fields.get("logprobs")


@pytest.mark.parametrize("make", [chat, completion])
def test_a_stream_has_no_place_for_log_probabilities_of_the_prompt(make: Any) -> None:
    check_prompt_logprobs(make(prompt_logprobs=1))
    check_prompt_logprobs(make(stream=True))
    with pytest.raises(Unsupported, match="not in a stream") as refused:
        check_prompt_logprobs(make(prompt_logprobs=0, stream=True))
    assert refused.value.param == "prompt_logprobs"


# ---------------------------------------------------------------- the form of the answer


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": OBJECT}}},
            Grammar("json_schema", '{"type":"object"}'),
        ),
        # compilers take no `true`, which means the same as {}
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            Grammar("json_schema", "{}"),
        ),
        ({"guided_json": OBJECT}, Grammar("json_schema", '{"type":"object"}', "guided_json")),
        ({"guided_json": "true"}, Grammar("json_schema", "{}", "guided_json")),
        (
            {"guided_json": '{"type": "object"}'},
            Grammar("json_schema", '{"type":"object"}', "guided_json"),
        ),
        ({"guided_regex": "a+"}, Grammar("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, Grammar("regex", "a|b", "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"', "guided_grammar")),
        (
            {"structured_outputs": {"json": OBJECT}},
            Grammar("json_schema", '{"type":"object"}', "structured_outputs"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Grammar("json_schema", '{"type":"object"}', "structured_outputs"),
        ),
        (
            {"structured_outputs": {"regex": "a"}},
            Grammar("regex", "a", "structured_outputs"),
        ),
        (
            {"structured_outputs": {"choice": ["a"]}},
            Grammar("regex", "a", "structured_outputs"),
        ),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            Grammar("lark", 'start: "a"', "structured_outputs"),
        ),
        (
            {"response_format": {"type": "text"}, "guided_regex": "a"},
            Grammar("regex", "a", "guided_regex"),
        ),
    ],
)
def test_the_form_of_an_answer_by_every_name_that_it_has(
    fields: dict[str, Any], expected: Grammar | None
) -> None:
    assert constraint(chat(**fields)) == expected
    assert chat_sampling(chat(**fields)).grammar == expected
    assert completion_sampling(completion(**fields)).grammar == expected


def test_a_choice_is_the_text_itself_whatever_signs_it_has() -> None:
    texts = ["a+b", "(c)", r"d\e", "f/g", "h|i", "#~-&"]
    form = constraint(chat(guided_choice=texts))
    assert form is not None
    for text in texts:
        assert re.fullmatch(form.text, text)
    for other in ["aab", "c", "h", "de", ""]:
        assert not re.fullmatch(form.text, other)


def test_a_grammar_in_gbnf_becomes_lark() -> None:
    form = constraint(chat(guided_grammar='root ::= "u" v\nv ::= "w" | "x"'))
    assert form is not None and form.kind == "lark"
    assert "start:" in form.text and "::=" not in form.text


@pytest.mark.parametrize(
    "text", ['start: "a"', 'x: "a"\n \t\n\r start \n : x', ' %llguidance {}\nstart[lazy]: "a"']
)
def test_lark_stays_as_it_is(text: str) -> None:
    assert is_lark_syntax(text)
    assert constraint(chat(guided_grammar=text)) == Grammar("lark", text, "guided_grammar")


@pytest.mark.parametrize("text", ["", "xstart: y", "x: start\n:", "%llguidances", "a start:"])
def test_other_texts_are_no_lark(text: str) -> None:
    assert not is_lark_syntax(text)
    with pytest.raises(RequestError, match="neither Lark"):
        constraint(chat(guided_grammar=text))


def test_gbnf_is_short_and_lark_as_long_as_it_likes() -> None:
    """Converting GBNF takes long, and it is done on the event loop."""
    rule = 'root ::= "a"\n'
    longest = rule + "#" * (MAX_GBNF_CHARS - len(rule))
    assert constraint(chat(guided_grammar=longest)) is not None
    with pytest.raises(RequestError, match=f"more than {MAX_GBNF_CHARS} characters") as refused:
        constraint(chat(guided_grammar=longest + "#"))
    assert refused.value.param == "guided_grammar"
    began_s = time.process_time()
    with pytest.raises(RequestError, match=f"more than {MAX_GBNF_CHARS} characters"):
        constraint(chat(guided_grammar="\n \t" * 200_000))
    assert time.process_time() - began_s < 2
    lark = 'start: "a"\n' + "//" * MAX_GBNF_CHARS
    assert constraint(chat(guided_grammar=lark)) == Grammar("lark", lark, "guided_grammar")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"guided_json": "{"}, "guided_json", "the schema is not valid JSON"),
        ({"guided_json": "[" * 99_999}, "guided_json", "the schema is not valid JSON"),
        ({"guided_json": "[]"}, "guided_json", "a JSON schema is an object"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "an empty text cannot be chosen"),
        ({"guided_grammar": "what"}, "guided_grammar", "neither Lark (a rule `start:`) nor GBNF"),
        ({"structured_outputs": {}}, "structured_outputs", "give one of json, regex, choice"),
        (
            {"structured_outputs": {"json_object": False}},
            "structured_outputs",
            "give one of json, regex, choice",
        ),
        (
            {"structured_outputs": {"regex": "a", "structural_tag": {}}},
            "structured_outputs.structural_tag",
            "structured_outputs.structural_tag is not supported",
        ),
        (
            {"structured_outputs": {"regex": "a", "json": {}}},
            "structured_outputs",
            "structured_outputs: ask for one form of the answer only",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format and guided_regex: ask for one form of the answer only",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_schema is required",
        ),
    ],
)
def test_a_form_that_cannot_be_had_is_refused_by_the_name_that_was_used(
    fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        constraint(chat(**fields))
    assert refused.value.param == param
    assert said in refused.value.message


def test_the_reason_why_a_grammar_is_refused_is_one_short_line() -> None:
    with pytest.raises(RequestError) as refused:
        constraint(chat(guided_grammar='root ::= "' + "x" * 1000))
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 300


# ---------------------------------------------------------------- prompts


def test_as_many_choices_as_the_limit_are_taken() -> None:
    most = completion(prompt=["a"] * (MAX_CHOICES // 2), n=2)
    assert len(completion_prompts(most)) == MAX_CHOICES // 2
    with pytest.raises(RequestError, match="65 prompts with 2 choices each are over the limit"):
        completion_prompts(completion(prompt=["a"] * (MAX_CHOICES // 2 + 1), n=2))


def test_an_empty_list_of_token_ids_is_named_by_its_place() -> None:
    with pytest.raises(RequestError, match=r"prompt\[1\]: expected at least one token id"):
        completion_prompts(completion(prompt=[[1], []]))


# ---------------------------------------------------------------- chats


def test_an_answer_goes_on_after_the_assistants_last_message_only() -> None:
    begun = [USER, {"role": "assistant", "content": "The"}]
    assert not continues(chat())
    assert not continues(chat(add_generation_prompt=True))
    assert continues(chat(messages=begun, continue_final_message=True))
    assert continues(chat(messages=begun, continue_final_message=True, add_generation_prompt=False))
    with pytest.raises(RequestError, match="has to be the assistant's"):
        continues(chat(continue_final_message=True))


def test_the_effort_of_thinking_is_told_by_each_name_that_templates_have() -> None:
    assert template_arguments(chat()) == {}
    given = {"a": 1}
    assert template_arguments(chat(chat_template_kwargs=given)) == given
    low = template_arguments(chat(reasoning_effort="low"))
    assert low == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    none = template_arguments(chat(reasoning_effort="none"))
    assert none == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    own = template_arguments(chat(reasoning_effort="none", chat_template_kwargs={"thinking": 1}))
    assert own["thinking"] == 1, "the client's own argument takes precedence"


def test_a_message_keeps_the_name_of_its_speaker() -> None:
    assert message(content="x", name="Ann") == ChatMessage("user", "x", "Ann")
    parts = [{"type": "text", "text": "x"}]
    assert message(content=parts, name="Ann") == ChatMessage("user", "x", "Ann")


def test_what_the_assistant_said_before_is_told_to_the_template() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    empty = {"id": "c2", "function": {"name": "g", "arguments": ""}}
    talk = [
        {"role": "assistant", "content": "so", "reasoning_content": "hm"},
        {"role": "assistant", "content": "so", "reasoning": "ah"},
        {"role": "assistant", "tool_calls": [call, empty]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]},
    ]
    assert chat_messages(chat(messages=talk).messages) == [
        ChatMessage("assistant", "so", reasoning="hm"),
        ChatMessage("assistant", "so", reasoning="ah"),
        ChatMessage(
            "assistant", "", tool_calls=(ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}"))
        ),
        ChatMessage("tool", "4", tool_call_id="c1"),
        ChatMessage("assistant", "no"),
        ChatMessage("assistant", "never"),
    ]


@pytest.mark.parametrize("arguments", ["{", "[" * 99_999, "[]", "null", '{"a": NaN}'])
def test_wrong_arguments_of_an_earlier_call_are_told_to_the_template(arguments: str) -> None:
    """As agents send them back, with the error as the result."""
    call = {"function": {"name": "f", "arguments": arguments}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}]
    [told] = chat_messages(chat(messages=turns).messages)[1].tool_calls
    assert json.loads(told.arguments) == {"INVALID_JSON": arguments}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"image_url": {"url": f"data:image/png;base64,{encode(PICTURE)}"}}, "image/gif"),
        ({"image_url": f"data:image/png;base64,{encode(PICTURE)}"}, "image/gif"),
        ({"input_audio": {"data": encode(SOUND), "format": "wav"}}, "audio/wav"),
        ({"audio_url": {"url": f"data:audio/wav;base64,{encode(SOUND)}"}}, "audio/wav"),
        ({"audio_url": f"DATA:audio/wav;base64,{encode(SOUND)}"}, "audio/wav"),
    ],
)
def test_images_and_recordings_stand_where_they_were_sent(part: dict[str, Any], kind: str) -> None:
    [name] = part
    parts = [{"type": "text", "text": "a"}, {"type": name, **part}, {"type": "text", "text": "b"}]
    made = message(content=parts)
    before, medium, after = made.parts
    assert isinstance(medium, Media) and medium.kind == kind
    assert (str(before).strip(), str(after).strip()) == ("a", "b")


@pytest.mark.parametrize("begin", ["", "data:text/plain;base64,", "data:;base64,"])
def test_a_file_is_its_text_after_its_name(begin: str) -> None:
    file = {"filename": "a.csv", "file_data": begin + encode(b"\xef\xbb\xbf1;2")}
    parts = [{"type": "text", "text": "Sum?"}, {"type": "file", "file": file}]
    assert message(content=parts).content == "Sum?\na.csv\n1;2"
    parts[1] = {"type": "file", "file": {"file_data": file["file_data"]}}
    assert message(content=parts).content == "Sum?\n1;2"


def test_an_image_keeps_the_wish_for_its_resolution() -> None:
    url = {"url": f"data:image/png;base64,{encode(PICTURE)}", "detail": "high"}
    assert message(content=[{"type": "image_url", "image_url": url}]).media[0].detail == "high"


@pytest.mark.parametrize(
    ("part", "param", "said"),
    [
        ({"type": "image_url"}, ".image_url", "is required"),
        ({"type": "input_audio"}, ".input_audio", "is required"),
        ({"type": "audio_url"}, ".audio_url", "is required"),
        (
            {"type": "audio_url", "audio_url": "https://example.com/a.wav"},
            ".audio_url",
            "expected data:audio/wav;base64,…",
        ),
        (
            {"type": "input_audio", "input_audio": {"data": encode(b"text")}},
            ".input_audio.data",
            "no WAV, MP3, FLAC or Ogg",
        ),
        ({"type": "text"}, "", "a text part needs `text`"),
        ({"type": "refusal"}, "", "not 'refusal'"),
        ({"type": "video"}, "", "text, image_url, input_audio or file, not 'video'"),
        ({"type": "file"}, ".file", "a file needs `file_data`"),
        ({"type": "file", "file": {"file_id": "file-1"}}, ".file", "a file needs `file_data`"),
        ({"type": "file", "file": {"file_data": encode(b"%PDF-1.7")}}, ".file", "such as PDF"),
        ({"type": "file", "file": {"file_data": encode(b"a\0b")}}, ".file", "such as PDF"),
        ({"type": "file", "file": {"file_data": encode(b"\xff")}}, ".file", "such as PDF"),
        ({"type": "file", "file": {"file_data": "ä"}}, ".file", "not base64"),
    ],
)
def test_a_part_that_is_wrong_is_named_by_its_place(
    part: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(RequestError) as refused:
        message(content=[{"type": "text", "text": "a"}, part])
    assert refused.value.param == f"messages[0].content[1]{param}"
    assert said in refused.value.message


# ---------------------------------------------------------------- the whole request

SHARED = {
    "n": 3,
    "stream": True,
    "stream_options": {"queue_position": True},
    "prompt_cache_key": "talk",
    "priority": -2,
    "timeout_s": 7,
    "temperature": 0,
}


def check_shared(asked: GenerationRequest) -> None:
    assert (asked.model, asked.n, asked.stream, asked.follow) == ("m", 3, True, True)
    assert (asked.session, asked.key, asked.priority, asked.timeout_s) == ("talk", "k", -2, 7)
    assert asked.params.temperature == 0


def test_a_chat_is_asked_for_with_all_that_the_body_says() -> None:
    asked = chat_request(chat(**SHARED, reasoning_effort="low"), "k")
    check_shared(asked)
    assert asked.messages == [ChatMessage("user", "hi")]
    assert asked.template["reasoning_effort"] == "low"
    assert not asked.continues and asked.reasoning and asked.tools == []


def test_a_completion_is_asked_for_with_all_that_the_body_says() -> None:
    request = completion(**SHARED)
    asked = completion_request(request, completion_prompts(request), "k")
    check_shared(asked)
    assert (asked.prompts, asked.params.max_tokens) == (["a"], 16)


def test_a_body_that_says_little_asks_for_one_whole_answer() -> None:
    for asked in (chat_request(chat(), ""), completion_request(completion(), ["a"], "")):
        assert (asked.n, asked.stream, asked.follow) == (1, False, False)
        assert (asked.session, asked.priority, asked.timeout_s) == ("", 0, None)


def test_no_queue_position_is_told_unless_it_was_asked_for() -> None:
    for options in ({}, {"queue_position": False}, {"include_usage": True}):
        assert not chat_request(chat(stream_options=options), "").follow


def test_tools_and_their_choice_are_passed_on_as_they_are() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    asked = chat_request(chat(tools=[tool], tool_choice="required"), "")
    assert (asked.tools, asked.tool_choice, asked.parallel) == ([tool], "required", True)
    assert chat_request(chat(tool_choice="auto"), "").tool_choice == "auto"
    assert not chat_request(chat(tools=[tool], parallel_tool_calls=False), "").parallel
    assert chat_request(chat(tools=[tool], parallel_tool_calls=True), "").parallel


def test_thoughts_stay_in_the_text_only_where_that_was_asked_for() -> None:
    assert chat_request(chat(separate_reasoning=True), "").reasoning
    assert not chat_request(chat(separate_reasoning=False), "").reasoning
