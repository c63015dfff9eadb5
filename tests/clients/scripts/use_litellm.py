"""LiteLLM: through its openai and ollama routes."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the internet when imported

import litellm
from report import KEY, LOOK, MODEL, QUESTION, URL, check, fits

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


for test in (chat, stream, forced_tool, as_ollama):
    check(test.__name__, test)
