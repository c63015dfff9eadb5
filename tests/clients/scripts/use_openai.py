"""The openai package: chats, streams, tools that are asked for, embeddings' absence, responses."""

from __future__ import annotations

import json

import openai
from report import KEY, LOOK, MODEL, QUESTION, URL, check, fits

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
ASKED = [{"role": "user", "content": QUESTION}]
NAMED = {"type": "function", "function": {"name": "look_up"}}


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


def chat() -> None:
    made = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=16)
    assert made.choices[0].message.content, made
    assert made.usage.completion_tokens <= 16, made.usage


def stream() -> None:
    asked = {"model": MODEL, "messages": ASKED, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = client.chat.completions.create(**asked, stream=True)
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole, (text, whole)


def forced_tool() -> None:
    for choice, finish in (("required", "tool_calls"), (NAMED, "stop")):
        made = client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=[LOOK], tool_choice=choice, max_tokens=200,
            parallel_tool_calls=False,
        ).choices[0]  # fmt: skip
        assert made.finish_reason == finish, made
        fits(json.loads(made.message.tool_calls[0].function.arguments))
        assert not made.message.content, made


def forced_tool_streamed() -> None:
    pieces = client.chat.completions.create(
        model=MODEL, messages=ASKED, tools=[LOOK], tool_choice=NAMED, max_tokens=200, stream=True
    )
    text = arguments = ""
    for piece in pieces:
        delta = piece.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or ():
            arguments += call.function.arguments or ""
    fits(json.loads(arguments))
    assert not text, text


def cut_tool() -> None:
    for limit in (1, 3, 6, 9, 12, 16):
        made = client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=[LOOK], tool_choice=NAMED, max_tokens=limit
        ).choices[0]
        assert not made.message.content, made
        assert made.finish_reason == "length" or made.message.tool_calls, made


def tool_result() -> None:
    call = {"name": "look_up", "arguments": '{"city": "Bern", "days": 1}'}
    turns = [
        *ASKED,
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]  # fmt: skip
    made = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=16)
    assert made.choices[0].message.content, made


def responses() -> None:
    made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16)
    assert made.output_text, made


def forced_response() -> None:
    tool = {"type": "function", **LOOK["function"], "strict": False}
    made = client.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=200
    )
    fits(json.loads(made.output[0].arguments))


def model_left_out() -> None:
    made = client.chat.completions.create(model="", messages=ASKED, max_tokens=4)
    assert made.choices, made


for test in (models, chat, stream, forced_tool, forced_tool_streamed, cut_tool, tool_result,
             responses, forced_response, model_left_out):  # fmt: skip
    check(test.__name__, test)
