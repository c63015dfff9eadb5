"""The anthropic package: messages, streams, tools by `any` and by name, the list of models."""

from __future__ import annotations

import anthropic
from report import KEY, LOOK, MODEL, QUESTION, URL, check, fits

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
FUNCTION = LOOK["function"]
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


def message() -> None:
    made = client.messages.create(**ASKED, max_tokens=16)
    assert made.content[0].text, made


def stream() -> None:
    with client.messages.stream(**ASKED, max_tokens=16) as pieces:
        text = "".join(pieces.text_stream)
    assert text


def forced_tool() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "look_up"}):
        made = client.messages.create(**ASKED, max_tokens=300, tools=[TOOL], tool_choice=choice)
        assert made.stop_reason == "tool_use", made
        assert {block.type for block in made.content} == {"tool_use"}, made
        fits(made.content[0].input)


def forced_tool_streamed() -> None:
    choice = {"type": "tool", "name": "look_up"}
    asked = {**ASKED, "max_tokens": 300, "tools": [TOOL], "tool_choice": choice}
    with client.messages.stream(**asked) as pieces:
        made = pieces.get_final_message()
    fits(made.content[0].input)


def models() -> None:
    listed = list(client.models.list())
    assert MODEL in [model.id for model in listed], listed
    assert client.models.retrieve(MODEL).id == MODEL


for test in (message, stream, forced_tool, forced_tool_streamed, models):
    check(test.__name__, test)
