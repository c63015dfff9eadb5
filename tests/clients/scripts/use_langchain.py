"""langchain-openai: chat, stream, bound tools, structured output, pictures, recordings."""

from __future__ import annotations

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
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
    check,
    encode,
    fits,
)

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


def picture() -> None:
    data = encode(PICTURE)
    uri = f"data:image/png;base64,{data}"
    for part in (
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image", "base64": data, "mime_type": "image/png"},
    ):
        ask(EYES, part)
        ask(EYES, part, use_responses_api=True)


def recording() -> None:
    sound = {"data": encode(SPEECH), "format": "wav"}
    ask(EARS, {"type": "input_audio", "input_audio": sound})
    ask(EARS, {"type": "audio", "base64": encode(SPEECH), "mime_type": "audio/wav"})


def ask(model: str, part: dict[str, object], **more: object) -> None:
    """Ask about a picture or a recording, whole and streamed."""
    asked = {"base_url": f"{URL}/v1", "api_key": KEY, "max_tokens": 12, "temperature": 0}
    llm = ChatOpenAI(model=model, max_retries=0, **asked, **more)
    turns = [HumanMessage([{"type": "text", "text": "What is this?"}, part])]
    whole = llm.invoke(turns)
    assert whole.usage_metadata["input_tokens"] > MEDIA_TOKENS, whole
    text = "".join(piece.text for piece in llm.stream(turns))
    assert text and text == whole.text, (text, whole)


for test in (chat, stream, forced_tool, structured):
    check(test.__name__, test)
for test, model in ((picture, EYES), (recording, EARS)):
    if model:
        check(test.__name__, test)
