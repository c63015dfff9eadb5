"""instructor: models of pydantic's by its modes."""

from __future__ import annotations

import instructor
import openai
from pydantic import BaseModel, Field
from report import KEY, MODEL, QUESTION, URL, check


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=7)


def ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)
    made = client.chat.completions.create(
        model=MODEL, response_model=Weather, max_tokens=200, max_retries=0,
        messages=[{"role": "user", "content": QUESTION}],
    )  # fmt: skip
    assert isinstance(made, Weather), made


check("tools", lambda: ask(instructor.Mode.TOOLS))
check("json_schema", lambda: ask(instructor.Mode.JSON_SCHEMA))
