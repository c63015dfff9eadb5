"""The openai package: chats, streams, tools that are asked for, responses, pictures, recordings."""

from __future__ import annotations

import json

import openai
from report import (
    EARS,
    EYES,
    KEY,
    LOOK,
    MEDIA_TOKENS,
    MODEL,
    PICTURE,
    QUESTION,
    SPEECH,
    URL,
    WHISPER,
    check,
    encode,
    fits,
)

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


def counted_response() -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION)
    made = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16)
    assert counted.input_tokens == made.usage.input_tokens, (counted, made.usage)


def forced_response() -> None:
    tool = {"type": "function", **LOOK["function"], "strict": False}
    made = client.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=200
    )
    fits(json.loads(made.output[0].arguments))


def model_left_out() -> None:
    made = client.chat.completions.create(model="", messages=ASKED, max_tokens=4)
    assert made.choices, made


def picture() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode(PICTURE)}"}}
    ask(EYES, part)


def picture_in_response() -> None:
    uri = f"data:image/png;base64,{encode(PICTURE)}"
    respond(EYES, {"type": "input_image", "image_url": uri, "detail": "auto"})


def recording() -> None:
    ask(EARS, {"type": "input_audio", "input_audio": {"data": encode(SPEECH), "format": "wav"}})


def recording_in_response() -> None:
    sound = {"data": encode(SPEECH), "format": "wav"}
    respond(EARS, {"type": "input_audio", "input_audio": sound})


def ask(model: str, part: dict[str, object]) -> None:
    """Ask about a picture or a recording, whole and streamed."""
    turns = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    asked = {"model": model, "messages": turns, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.usage.prompt_tokens > MEDIA_TOKENS, whole.usage
    pieces = client.chat.completions.create(**asked, stream=True)
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text and text == whole.choices[0].message.content, (text, whole)


def respond(model: str, part: dict[str, object]) -> None:
    turns = [{"role": "user", "content": [part, {"type": "input_text", "text": "What is this?"}]}]
    asked = {"model": model, "input": turns, "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.usage.input_tokens > MEDIA_TOKENS, whole.usage
    with client.responses.stream(**asked) as pieces:
        text = "".join(p.delta for p in pieces if p.type == "response.output_text.delta")
    assert text and text == whole.output_text, (text, whole)


def transcription() -> None:
    for send in (SPEECH, ("a.wav", SPEECH.read_bytes()), ("a.wav", SPEECH.open("rb"), "audio/wav")):
        made = client.audio.transcriptions.create(model=WHISPER, file=send)
        assert made.text and made.usage.seconds == 2, made
    told = client.audio.transcriptions.create(
        model=WHISPER, file=SPEECH, response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )  # fmt: skip
    assert told.duration == 1.5 and told.segments and told.words, told
    srt = client.audio.transcriptions.create(model=WHISPER, file=SPEECH, response_format="srt")
    assert "-->" in srt, srt


def transcription_streamed() -> None:
    whole = client.audio.transcriptions.create(model=WHISPER, file=SPEECH).text
    events = list(client.audio.transcriptions.create(model=WHISPER, file=SPEECH, stream=True))
    text = "".join(one.delta for one in events if one.type == "transcript.text.delta")
    assert events[-1].type == "transcript.text.done", events
    assert (text.strip(), events[-1].text) == (whole, whole), events


def translation() -> None:
    assert client.audio.translations.create(model=WHISPER, file=SPEECH).text


for test in (models, chat, stream, forced_tool, forced_tool_streamed, cut_tool, tool_result,
             responses, counted_response, forced_response, model_left_out):  # fmt: skip
    check(test.__name__, test)
for test in (picture, picture_in_response) if EYES else ():
    check(test.__name__, test)
for test in (recording, recording_in_response) if EARS else ():
    check(test.__name__, test)
for test in (transcription, transcription_streamed, translation) if WHISPER else ():
    check(test.__name__, test)
