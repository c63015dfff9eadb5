"""The anthropic package: messages, streams, tools by `any` and by name, models, pictures."""

from __future__ import annotations

import anthropic
from report import (
    EYES,
    KEY,
    LOOK,
    MEDIA_TOKENS,
    MODEL,
    PICTURE,
    QUESTION,
    URL,
    check,
    encode,
    fits,
)

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
FUNCTION = LOOK["function"]
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
#: Version 2 of the package has no parameter for it.
GREEDY = {"temperature": 0}


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


def document() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "The password is swordfish."}
    blocks = [{"type": "document", "source": source}, {"type": "text", "text": "The password?"}]
    turns = [{"role": "user", "content": blocks}]
    made = client.messages.create(model=MODEL, messages=turns, max_tokens=16, extra_body=GREEDY)
    plain = [{"role": "user", "content": "The password?"}]
    count = client.messages.count_tokens(model=MODEL, messages=plain).input_tokens
    assert made.usage.input_tokens > count, (made.usage, count)


def picture() -> None:
    """In a message and in a tool's result, whole and streamed, and counted."""
    source = {"type": "base64", "media_type": "image/png", "data": encode(PICTURE)}
    block = {"type": "image", "source": source}
    call = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"city": "Bern", "days": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block]}
    plain = [{"role": "user", "content": [block, {"type": "text", "text": "What is this?"}]}]
    called = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    for turns in (plain, called):
        asked = {"model": EYES, "messages": turns}
        count = client.messages.count_tokens(**asked).input_tokens
        made = client.messages.create(**asked, max_tokens=12, extra_body=GREEDY)
        read = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
        assert read == count > MEDIA_TOKENS, (made.usage, count)
        with client.messages.stream(**asked, max_tokens=12, extra_body=GREEDY) as pieces:
            text = "".join(pieces.text_stream)
        assert text and text == made.content[0].text, (text, made)


for test in (message, stream, forced_tool, forced_tool_streamed, document, models):
    check(test.__name__, test)
if EYES:
    check("picture", picture)
