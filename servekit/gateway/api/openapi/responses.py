"""OpenAI's answers of /v1/responses: a response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from servekit.gateway.api.openapi.openai import ChatLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    """A message of the model's."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """Thoughts, of a model that thinks."""

    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A call of a function that the model asks for."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseError(Struct):
    """Why there is no response."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(Struct):
    """What was asked of the model's thoughts."""

    effort: str | None
    summary: str | None


class ResponseText(Struct):
    """What was asked of the text."""

    format: dict[str, Any]


class InputTokensDetails(Struct):
    """Of the prompt's tokens."""

    cached_tokens: int


class OutputTokensDetails(Struct):
    """Of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(Struct):
    """A response. None is kept: `store` is false, and there is never one before it."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ResponseReasoning
    store: bool
    temperature: float | None
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


# ---------------------------------------------------------------- events


class ResponseEvent(Struct):
    """The response as it is now: when it begins, and when it is over."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete"
    ]
    sequence_number: int
    response: Response


class OutputItemEvent(Struct):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class ContentPartEvent(Struct):
    """A part of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextDeltaEvent(Struct):
    """More text, or more thoughts. `logprobs` go with text only."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class TextDoneEvent(Struct):
    """Text, or thoughts, as a whole."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ArgumentsDeltaEvent(Struct):
    """More of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(Struct):
    """The arguments of a call as a whole."""

    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(Struct):
    """The stream ends here: something went wrong after it had begun."""

    type: Literal["error"]
    sequence_number: int
    code: str
    message: str
    param: str | None


EVENTS = (
    ResponseEvent,
    OutputItemEvent,
    ContentPartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ErrorEvent,
)
