"""OpenAI's answers of /v1/responses: a response, its items, and the events of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from servekit.gateway.api.fields import (
    MODEL,
    AnswerTokens,
    Arguments,
    CachedTokens,
    FunctionName,
    Problem,
    PromptTokens,
    Text,
    Thoughts,
    TotalTokens,
    UnixTime,
    doc,
)
from servekit.gateway.api.openai.response_types import ChatLogprob

Status = Annotated[
    Literal["in_progress", "completed", "incomplete"], doc("The progress", "completed")
]
Empty = Annotated[list[Any], doc("Always empty", [])]
#: A field that repeats a parameter of the request.
REQUESTED = doc("As requested")


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: Text
    annotations: Empty
    logprobs: Annotated[list[ChatLogprob], doc("Log probabilities, if requested", [])]


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Thoughts of the model."""

    text: Thoughts


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    """Thoughts of the model, where the request wants a summary."""

    text: Thoughts


class _Item(Struct):
    id: Annotated[str, doc("The id of the item", "msg_db8396fb0f9c5bde0e7b35f4")]
    status: Status


class OutputMessage(_Item, tag_field="type", tag="message"):
    """A message by the model."""

    role: Literal["assistant"]
    content: Annotated[list[OutputText], doc("The parts of the message")]


class OutputReasoning(_Item, tag_field="type", tag="reasoning"):
    """The thoughts of a model that thinks."""

    summary: Annotated[list[SummaryText], doc("The thoughts, if a summary is requested", [])]
    content: Annotated[list[ReasoningText], doc("The thoughts, if none is requested")]


class OutputCall(_Item, tag_field="type", tag="function_call"):
    """A call of a function by the model."""

    call_id: Annotated[str, doc("The id that the output of the call has to name")]
    name: FunctionName
    arguments: Arguments


OutputItem = OutputMessage | OutputReasoning | OutputCall


class ResponseError(Struct):
    """The reason why a response failed."""

    code: Annotated[str, doc("The name of the error")]
    message: Problem


class IncompleteDetails(Struct):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseReasoning(Struct):
    """The request's options of thoughts."""

    effort: Annotated[str | None, REQUESTED]
    summary: Annotated[str | None, REQUESTED]


class ResponseText(Struct):
    """The request's options of the text."""

    format: Annotated[dict[str, Any], doc("As requested", {"type": "text"})]


class InputTokensDetails(Struct):
    """Details of the prompt's tokens."""

    cached_tokens: CachedTokens
    cache_write_tokens: Annotated[int, doc("Always 0: writing to the cache costs nothing")]


class OutputTokensDetails(Struct):
    """Details of the answer's tokens."""

    reasoning_tokens: Annotated[int, doc("Always 0: thoughts are not counted apart")]


class ResponseUsage(Struct):
    """Tokens of the prompt and of the answer."""

    input_tokens: PromptTokens
    input_tokens_details: Annotated[InputTokensDetails, doc("Details of these tokens")]
    output_tokens: AnswerTokens
    output_tokens_details: Annotated[OutputTokensDetails, doc("Details of these tokens")]
    total_tokens: TotalTokens


_USAGE = {
    "input_tokens": 37,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 8,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 45,
}


class Response(Struct):
    """A response."""

    id: Annotated[str, doc("The id of the response", "resp_0f9c5bde0e7b35f4db8396fb")]
    object: Literal["response"]
    created_at: UnixTime
    status: Annotated[
        Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"],
        doc("The progress", "completed"),
    ]
    background: Annotated[bool, doc("As requested", False)]
    error: Annotated[ResponseError | None, doc("What went wrong")]
    incomplete_details: Annotated[IncompleteDetails | None, doc("Why it is incomplete")]
    instructions: Annotated[str | None, REQUESTED]
    max_output_tokens: Annotated[int | None, doc("As requested", 64)]
    metadata: Annotated[dict[str, str], REQUESTED]
    model: Annotated[str, doc("The name of the model that answered", MODEL)]
    output: Annotated[list[OutputItem], doc("Thoughts, text and calls of the model, in order")]
    parallel_tool_calls: Annotated[bool, doc("As requested", True)]
    previous_response_id: Annotated[str | None, REQUESTED]
    reasoning: Annotated[ResponseReasoning, REQUESTED]
    store: Annotated[bool, doc("Whether it is kept; see `server.store_responses`", False)]
    temperature: Annotated[float | None, doc("As requested; null is the model's own")]
    text: Annotated[ResponseText, REQUESTED]
    tool_choice: Annotated[str | dict[str, Any], doc("As requested", "auto")]
    tools: Annotated[list[dict[str, Any]], doc("As requested", [])]
    top_p: Annotated[float | None, doc("As requested; null is the model's own")]
    truncation: Literal["disabled"]
    usage: Annotated[ResponseUsage | None, doc("Token counts, at the end", _USAGE)]
    user: Annotated[str | None, REQUESTED]


# ---------------------------------------------------------------- events


class _Event(Struct, kw_only=True):
    sequence_number: Annotated[int, doc("Counts the events of a stream, from 0")]


class ResponseEvent(_Event, kw_only=True):
    """The response at its begin and at its end; queued and failed only in the background."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Annotated[Response, doc("The response as it is now")]


class OutputItemEvent(_Event, kw_only=True):
    """The begin, or the end, of an item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: Annotated[int, doc("The position of the item in `output`")]
    item: Annotated[OutputItem, doc("The item as it is now")]


class _ItemEvent(_Event, kw_only=True):
    item_id: Annotated[str, doc("The id of the item")]
    output_index: Annotated[int, doc("The position of the item in `output`")]


class _PartEvent(_ItemEvent, kw_only=True):
    content_index: Annotated[int, doc("The position of the part in the item")]


class ContentPartEvent(_PartEvent, kw_only=True):
    """The begin, or the end, of a part of an item."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, doc("The part as it is now")]


class TextDeltaEvent(_PartEvent, kw_only=True):
    """More text, or more thoughts."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    delta: Annotated[str, doc("The new text")]
    logprobs: Annotated[list[ChatLogprob], doc("Those of the text")] | UnsetType = UNSET


class TextDoneEvent(_PartEvent, kw_only=True):
    """The whole text, or the whole thoughts."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    text: Text
    logprobs: Annotated[list[ChatLogprob], doc("Those of the text")] | UnsetType = UNSET


class _SummaryEvent(_ItemEvent, kw_only=True):
    summary_index: Annotated[int, doc("Always 0")]


class SummaryPartEvent(_SummaryEvent, kw_only=True):
    """The begin, or the end, of a summary."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: Annotated[SummaryText, doc("The summary as it is now")]


class SummaryDeltaEvent(_SummaryEvent, kw_only=True):
    """More thoughts, as a summary."""

    type: Literal["response.reasoning_summary_text.delta"]
    delta: Annotated[str, doc("The new text")]


class SummaryDoneEvent(_SummaryEvent, kw_only=True):
    """The whole thoughts, as a summary."""

    type: Literal["response.reasoning_summary_text.done"]
    text: Thoughts


class ArgumentsDeltaEvent(_ItemEvent, kw_only=True):
    """More of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: Annotated[str, doc("The new part of the arguments")]


class ArgumentsDoneEvent(_ItemEvent, kw_only=True):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: FunctionName
    arguments: Arguments


class ErrorEvent(_Event, kw_only=True):
    """An error after the stream had begun; the last event."""

    type: Literal["error"]
    code: Annotated[str, doc("The name of the error")]
    message: Problem
    param: None


class InputItems(Struct):
    """The items that the model was asked with, earlier responses included."""

    object: Literal["list"]
    data: Annotated[list[dict[str, Any]], doc("The items")]
    first_id: Annotated[str | None, doc("The id of the first of these items")]
    last_id: Annotated[str | None, doc("The id of the last of these items")]
    has_more: Annotated[bool, doc("Whether there are more", False)]


class InputTokens(Struct):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: Annotated[int, doc("Tokens of the prompt", 37)]


class RemovedResponse(Struct):
    """A response that is no longer kept."""

    id: Annotated[str, doc("The id of the response", "resp_0f9c5bde0e7b35f4db8396fb")]
    object: Literal["response"]
    deleted: Literal[True]


EVENTS = (
    ResponseEvent,
    OutputItemEvent,
    ContentPartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    SummaryPartEvent,
    SummaryDeltaEvent,
    SummaryDoneEvent,
    ErrorEvent,
)
