"""Outlines over its vLLM backend and its OpenAI backend: answers that fit, not answers that try."""

from __future__ import annotations

import json
import re
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict, Field
from report import KEY, MODEL, QUESTION, URL, check

#: The longest answer: 20 characters of up to 4 tokens, and up to 40 of white space in 6 places.
WEATHER_TOKENS = 400
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
vllm = outlines.from_vllm(client, MODEL)
plain = outlines.from_openai(client, MODEL)


class Weather(BaseModel):
    """The weather of a city; a schema that allows further properties has no longest answer."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=7)


def text() -> None:
    assert vllm(QUESTION, max_tokens=16)


def json_schema() -> None:
    for model in (vllm, plain):
        Weather.model_validate_json(model(QUESTION, Weather, max_tokens=WEATHER_TOKENS))


def choice() -> None:
    assert vllm(QUESTION, Literal["Rome", "Paris"], max_tokens=16) in ("Rome", "Paris")


def regex() -> None:
    made = vllm(QUESTION, Regex(r"[0-9]{3}-[0-9]{4}"), max_tokens=32)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", made), made


def grammar() -> None:
    made = vllm(QUESTION, CFG('start: "[" ("1" | "2") "]"'), max_tokens=16)
    assert json.loads(made) in ([1], [2]), made


def stream() -> None:
    made = "".join(vllm.stream(QUESTION, Weather, max_tokens=WEATHER_TOKENS))
    Weather.model_validate_json(made)


for test in (text, json_schema, choice, regex, grammar, stream):
    check(test.__name__, test)
