"""pydantic-ai: an agent's text, and output that is forced by a tool or by a schema."""

from __future__ import annotations

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import KEY, MODEL, QUESTION, URL, check

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider, settings={"max_tokens": 200})


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=7)


def text() -> None:
    assert Agent(model).run_sync(QUESTION).output


def by_tool() -> None:
    made = Agent(model, output_type=ToolOutput(Weather)).run_sync(QUESTION).output
    assert isinstance(made, Weather), made


def by_schema() -> None:
    made = Agent(model, output_type=NativeOutput(Weather)).run_sync(QUESTION).output
    assert isinstance(made, Weather), made


for test in (text, by_tool, by_schema):
    check(test.__name__, test)
