"""Anthropic's answers: a message, its blocks, and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What the model thought, where `thinking` was asked for."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool that the model asks for."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct):
    """Tokens of the prompt and of the answer so far."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class AnthropicMessage(Struct):
    """The answer of /v1/messages where it is not streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


# ---------------------------------------------------------------- events


class MessageStart(Struct):
    """First: the message, empty yet."""

    type: Literal["message_start"]
    message: AnthropicMessage


class PingEvent(Struct):
    """Says nothing."""

    type: Literal["ping"]


class ContentBlockStart(Struct):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class BlockTextDelta(Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class BlockThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """More of the thoughts."""

    thinking: str


class BlockInputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """More of the JSON of a call's input."""

    partial_json: str


class ContentBlockDelta(Struct):
    """More of the block at `index`."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockTextDelta | BlockThinkingDelta | BlockInputDelta


class ContentBlockStop(Struct):
    """The block at `index` is whole."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Struct):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct):
    """Why it ended, and the tokens in all."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Struct):
    """Last."""

    type: Literal["message_stop"]


class AnthropicErrorObject(Struct):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(Struct):
    """An error in Anthropic's envelope; in a stream that has begun it is an event, the last."""

    type: Literal["error"]
    error: AnthropicErrorObject


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
