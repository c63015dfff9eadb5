"""LiteLLM: through its openai, anthropic and ollama routes; pictures and recordings."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the internet when imported

import litellm
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

ASKED = [{"role": "user", "content": QUESTION}]
OURS = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "messages": ASKED}


def chat() -> None:
    assert litellm.completion(**OURS, max_tokens=16).choices[0].message.content


def stream() -> None:
    pieces = litellm.completion(**OURS, max_tokens=16, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)


def forced_tool() -> None:
    made = litellm.completion(**OURS, tools=[LOOK], tool_choice="required", max_tokens=200)
    fits(json.loads(made.choices[0].message.tool_calls[0].function.arguments))


def as_ollama() -> None:
    made = litellm.completion(
        model=f"ollama_chat/{MODEL}", api_base=URL, messages=ASKED, max_tokens=16
    )
    assert made.choices[0].message.content


def picture() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode(PICTURE)}"}}
    for route in (
        {"model": f"openai/{EYES}", "api_base": f"{URL}/v1", "api_key": KEY},
        {"model": f"anthropic/{EYES}", "api_base": URL, "api_key": KEY},
        {"model": f"ollama_chat/{EYES}", "api_base": URL},
    ):
        ask(route, part)


def recording() -> None:
    part = {"type": "input_audio", "input_audio": {"data": encode(SPEECH), "format": "wav"}}
    ask({"model": f"openai/{EARS}", "api_base": f"{URL}/v1", "api_key": KEY}, part)


def ask(route: dict[str, str], part: dict[str, object]) -> None:
    """Ask about a picture or a recording, whole and streamed."""
    turns = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    asked = {**route, "messages": turns, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(**asked)
    assert whole.usage.prompt_tokens > MEDIA_TOKENS, (route, whole.usage)
    pieces = litellm.completion(**asked, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text and text == whole.choices[0].message.content, (route, text, whole)


def transcription() -> None:
    ours = {"model": f"openai/{WHISPER}", "api_base": f"{URL}/v1", "api_key": KEY}
    with SPEECH.open("rb") as file:
        assert litellm.transcription(**ours, file=file).text
    with SPEECH.open("rb") as file:
        told = litellm.transcription(**ours, file=file, response_format="verbose_json")
    assert told.text and told.segments, told


for test in (chat, stream, forced_tool, as_ollama):
    check(test.__name__, test)
for test, model in ((picture, EYES), (recording, EARS), (transcription, WHISPER)):
    if model:
        check(test.__name__, test)
