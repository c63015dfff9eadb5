"""langchain-openai: chat, stream, bound tools, structured output."""

from __future__ import annotations

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from report import KEY, LOOK, MODEL, QUESTION, URL, check, fits

llm = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=200, max_retries=0)


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=7)


def chat() -> None:
    assert llm.invoke(QUESTION).content


def stream() -> None:
    assert "".join(str(piece.content) for piece in llm.stream(QUESTION))


def forced_tool() -> None:
    made = llm.bind_tools([LOOK], tool_choice="look_up").invoke(QUESTION)
    fits(made.tool_calls[0]["args"])


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        made = llm.with_structured_output(Weather, method=method).invoke(QUESTION)
        assert isinstance(made, Weather), (method, made)


for test in (chat, stream, forced_tool, structured):
    check(test.__name__, test)
