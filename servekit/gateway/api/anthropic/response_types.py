"""Anthropic's answers: a message, its blocks, and the events of its stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from servekit.gateway.api.fields import (
    Answering,
    AnswerTokens,
    CachedTokens,
    Index,
    Problem,
    Text,
    Thoughts,
    doc,
)

StopReason = Annotated[
    Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"],
    doc("Why the message ended; null at the begin of a stream", "end_turn"),
]
StopSequence = Annotated[str | None, doc("The one of `stop_sequences` that ended the message")]


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: Text


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """Thoughts of the model, if `thinking` was requested."""

    thinking: Thoughts
    signature: Annotated[str, doc("Always empty")]


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool by the model."""

    id: Annotated[str, doc("The id of the call")]
    name: Annotated[str, doc("The name of the tool")]
    input: dict[str, Any]
    """The arguments; {"INVALID_JSON": text} if the model's text is not a JSON object."""


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct):
    """Tokens of the prompt and of the answer so far."""

    input_tokens: Annotated[int, doc("Tokens of the prompt that were not cached", 37)]
    output_tokens: AnswerTokens
    cache_creation_input_tokens: Annotated[int, doc("Always 0")]
    cache_read_input_tokens: CachedTokens


class AnthropicMessage(Struct):
    """The answer of /v1/messages if it is not streamed."""

    id: Annotated[str, doc("The id of the message", "msg_52e377a07e6afcd91facea00")]
    type: Literal["message"]
    role: Literal["assistant"]
    model: Answering
    content: Annotated[list[ContentBlock], doc("The blocks of the answer")]
    stop_reason: StopReason | None
    stop_sequence: StopSequence
    usage: Annotated[MessageUsage, doc("Token counts")]


class TokenCount(Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: Annotated[int, doc("Tokens of the prompt", 37)]


# ---------------------------------------------------------------- events


class MessageStart(Struct):
    """The first event: the message, still empty."""

    type: Literal["message_start"]
    message: Annotated[AnthropicMessage, doc("The message, still empty")]


class PingEvent(Struct):
    """An event without a meaning."""

    type: Literal["ping"]


class _BlockEvent(Struct):
    index: Index


class ContentBlockStart(_BlockEvent, kw_only=True):
    """The begin of a block."""

    type: Literal["content_block_start"]
    content_block: Annotated[ContentBlock, doc("The block, still empty")]


class BlockTextDelta(Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: Text


class BlockThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """More of the thoughts."""

    thinking: Thoughts


class BlockInputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """More of the input of a call."""

    partial_json: Annotated[str, doc("A piece of the text of a JSON object")]


class ContentBlockDelta(_BlockEvent, kw_only=True):
    """More of the block at `index`."""

    type: Literal["content_block_delta"]
    delta: Annotated[
        BlockTextDelta | BlockThinkingDelta | BlockInputDelta, doc("The new part of the block")
    ]


class ContentBlockStop(_BlockEvent, kw_only=True):
    """The end of the block at `index`."""

    type: Literal["content_block_stop"]


class MessageEnd(Struct):
    """The end of a message."""

    stop_reason: StopReason
    stop_sequence: StopSequence


class MessageDelta(Struct):
    """The reason of the end, and all token counts."""

    type: Literal["message_delta"]
    delta: Annotated[MessageEnd, doc("The reason of the end")]
    usage: Annotated[MessageUsage, doc("Token counts")]


class MessageStop(Struct):
    """The last event."""

    type: Literal["message_stop"]


class AnthropicErrorObject(Struct):
    """The error's type and sentence."""

    type: Annotated[str, doc("The kind of error, by its status", "invalid_request_error")]
    message: Problem
    details: Annotated[dict[str, str], doc("For Anthropic's SDK, of `thread` only")] | UnsetType = (
        UNSET
    )


class AnthropicError(Struct):
    """An error in Anthropic's format; in a stream that has begun it is the last event."""

    type: Literal["error"]
    error: Annotated[AnthropicErrorObject, doc("What went wrong")]


EVENTS = (
    MessageStart,
    PingEvent,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
    AnthropicError,
)
