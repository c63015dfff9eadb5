"""Converts request bodies of Anthropic's Messages API to servekit's types.

Parameters of Anthropic's that have no meaning here are ignored (caching, service tiers, the user's
id). Unserved parameters that would change the answer are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.anthropic.tools import Tool, ToolChoice
from servekit.gateway.api.fields import (
    FORM,
    QUESTION,
    SCHEMA,
    TOOLS,
    Ignored,
    ModelName,
    Stream,
    doc,
)
from servekit.gateway.api.images import join_parts, make_message, read_base64, read_data_uri
from servekit.gateway.api.openai.request import schema_grammar
from servekit.gateway.api.openai.schema import (
    MAX_STOPS,
    TOP_K,
    Count,
    StopString,
    Temperature,
    TopP,
    Whole,
)
from servekit.protocol.messages import ChatMessage, Media, SamplingParams, ToolCall
from servekit.protocol.tool_formats import THINKING_SWITCHES


class ThreadUnsupported(Unsupported):
    """Anthropic's threads are not kept here. Send the whole conversation without `thread`, as
    Anthropic's SDK then does by itself.
    """

    code = "thread_unsupported_request"


def _unsupported(*harmless: Any) -> Meta:
    values = [None, *harmless]
    return Meta(description="Not supported", extra_json_schema={"enum": values})


class Source(msgspec.Struct):
    """The bytes of an image, or the text of a document."""

    type: Annotated[str, doc("base64 or url of an image; text or content of a document")] = ""
    data: Annotated[str, doc("A PNG, JPEG, WebP or GIF file; the text of a document")] = ""
    content: Annotated[str | list[Block] | None, doc("Text, or blocks of text and images")] = None
    url: Annotated[str, doc("Its address, where `server.fetch_images` allows its host")] = ""
    media_type: Annotated[str, doc("Has no effect: the file's own signature counts")] = ""


class Block(msgspec.Struct):
    """A block of content. Its `type` decides which of the fields it has."""

    type: str
    """text, image, document, search_result, thinking, tool_use or tool_result, and tool_reference
    in its content; documents are text: PDF files are refused."""
    source: Annotated[Source | str | None, doc("The image or document; whence a result is")] = None
    title: Annotated[str, doc("The title of a document or search result")] | None = None
    context: Annotated[str, doc("What else to know of a document")] | None = None
    text: Annotated[str, doc("The text")] | None = None
    thinking: Annotated[str, doc("The assistant's thoughts")] | None = None
    id: Annotated[str, doc("The id of the call")] = ""
    name: Annotated[str, doc("The name of the tool")] = ""
    input: Annotated[dict[str, Any], doc("The arguments of the call")] | None = None
    tool_use_id: Annotated[str, doc("The id of the call that has this result")] | None = None
    content: Annotated[str | list[Block] | None, doc("Text, or blocks of type text")] = None
    tool_name: Annotated[str, doc("The tool that a tool_reference within a result names")] = ""
    is_error: bool | None = None
    """The tool failed: the model reads `Error: ` before the result."""


class Message(msgspec.Struct):
    """A turn of the conversation."""

    role: Annotated[Literal["user", "assistant", "system"], doc("The speaker", "user")]
    content: Annotated[str | list[Block], doc("Text, or blocks", QUESTION)]


class Thinking(msgspec.Struct):
    """The switch for thinking. `adaptive` is like `enabled`, without a budget."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    """A budget that is passed to the chat template; less than `max_tokens`."""


class OutputFormat(msgspec.Struct):
    """A JSON schema that the answer has to fit."""

    schema: Annotated[dict[str, Any], SCHEMA]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(msgspec.Struct):
    """Options of the answer."""

    format: Annotated[OutputFormat | None, FORM] = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Passed to the chat template."""


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens: what a prompt is made of."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    """The conversation. `server.limits.messages` may allow fewer messages."""
    model: ModelName = ""
    system: Annotated[str | list[Block] | None, doc("A system message before the others")] = None
    thinking: Annotated[Thinking | None, doc("Whether to think and to return thoughts")] = None
    tools: Annotated[list[Tool], TOOLS, Meta(max_length=1024)] | None = None
    tool_choice: Annotated[ToolChoice | None, doc("Whether a tool may or has to be called")] = None
    output_config: Annotated[OutputConfig | None, doc("Options of the answer")] = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    context_management: Ignored = None
    # refused by name if they are set:
    mcp_servers: Annotated[Any, _unsupported([])] = None
    container: Annotated[Any, _unsupported()] = None
    thread: Annotated[Any, _unsupported()] = None


class Metadata(msgspec.Struct):
    """The user."""

    user_id: Annotated[str, doc("Has no effect")] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[Count, Meta(examples=[64])]
    """Most tokens to generate; a value beyond the context means its end."""
    stream: Stream | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    """The answer ends before the first of these strings, and says which it was."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[Whole, TOP_K] | None = None
    metadata: Annotated[Metadata | None, doc("Has no effect")] = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    cache_control: Ignored = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation for the chat template, and whether the client wants the reasoning."""

    messages: list[ChatMessage]
    template: dict[str, Any]
    template_defaults: dict[str, Any]
    continues: bool
    thinks: bool
    found_tools: set[str]  # those that results name by a tool_reference


def sampling(request: MessagesRequest) -> SamplingParams:
    """Return the sampling parameters. max_tokens is clamped: clients send large values."""
    output = request.output_config
    format = (output and output.format) or request.output_format
    return SamplingParams(
        max_tokens=request.max_tokens,
        clamp=True,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=tuple(request.stop_sequences or ()),
        grammar=None if format is None else schema_grammar(format.schema),
    )


def conversation(request: CountRequest) -> Conversation:
    """Return the conversation of a request.

    Raises RequestError for content that is not text, and Unsupported for unserved parameters.
    """
    for name in ("mcp_servers", "container"):
        if getattr(request, name):
            raise Unsupported(f"{name} is not supported; leave it out", param=name)
    if request.thread:
        raise ThreadUnsupported(
            "thread: no threads are kept here; send the whole conversation without it",
            param="thread",
        )
    messages = _messages(request)
    last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        raise RequestError(
            "messages: the last one calls tools; a user's message with their tool_results has to"
            " follow",
            param="messages",
        )
    if last.role == "assistant" and not last.content and len(messages) > 1:
        messages.pop()  # an empty beginning of the answer means none
    return Conversation(
        *(messages, _template(request), {} if request.thinking else _switch_thinking(False)),
        *(messages[-1].role == "assistant", _thinks(request.thinking)),
        set(_find_tools([message.content for message in request.messages])),
    )


def _find_tools(contents: list[str | list[Block]]) -> Iterator[str]:
    """Yield the names of the tools that results name."""
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    for block in blocks:
        if block.type == "tool_result" and isinstance(block.content, list):
            yield from (one.tool_name for one in block.content if one.type == "tool_reference")


def _thinks(thinking: Thinking | None) -> bool:
    """Return whether to think; in Anthropic's API this is off by default."""
    return thinking is not None and thinking.type != "disabled"


def _switch_thinking(on: bool) -> dict[str, Any]:
    return dict.fromkeys(THINKING_SWITCHES, on)


def _template(request: CountRequest) -> dict[str, Any]:
    """Return the chat template's arguments. A few templates know a budget; others ignore it."""
    given = _switch_thinking(_thinks(request.thinking)) if request.thinking else {}
    if request.thinking and request.thinking.type == "enabled":
        budget = request.thinking.budget_tokens
        if budget is None:
            raise RequestError("thinking.budget_tokens is required", param="thinking")
        if isinstance(request, MessagesRequest) and budget >= request.max_tokens:
            raise RequestError(
                f"thinking.budget_tokens is {budget}: it has to be less than max_tokens, which"
                " counts thoughts, too",
                param="thinking",
            )
        given["thinking_budget"] = budget
    if request.output_config and request.output_config.effort:
        given["reasoning_effort"] = request.output_config.effort
    return given


# ---------------------------------------------------------------- messages


def _messages(request: CountRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    if request.system:
        messages.append(ChatMessage("system", _text(request.system, "system")))
    names: dict[str, str] = {}  # names of the tools called so far, by the ids of the calls
    for at, message in enumerate(request.messages):
        where = f"messages[{at}].content"
        messages += _convert(message, where, names)
    return [one for _, row in groupby(messages, _role) for one in _joined(list(row))]


def _role(message: ChatMessage) -> str:
    return message.role


def _joined(row: list[ChatMessage]) -> list[ChatMessage]:
    """Join consecutive messages of the user or the assistant into one, as Anthropic does."""
    first = row[0]
    if len(row) == 1 or first.role not in ("user", "assistant"):
        return row
    content, images = join_parts([part for one in row for part in one.parts])
    calls = tuple(call for one in row for call in one.tool_calls)
    reasoning = "\n".join([one.reasoning for one in row if one.reasoning]) or None
    return [replace(first, content=content, tool_calls=calls, reasoning=reasoning, media=images)]


def _convert(message: Message, where: str, names: dict[str, str]) -> Iterator[ChatMessage]:
    content = message.content
    if isinstance(content, str):
        yield ChatMessage(message.role, content)
    elif message.role == "assistant":
        yield _assistant(content, where, names)
    elif message.role == "system":
        yield ChatMessage("system", _text(content, where))
    else:
        yield from _user(content, where, names)


def _user(blocks: list[Block], where: str, names: dict[str, str]) -> Iterator[ChatMessage]:
    """Yield the user's parts, with each tool result as a message of its own at its place."""
    parts: list[str | Media] = []
    for at, block in enumerate(blocks):
        if block.type != "tool_result":
            parts += _parts(block, f"{where}[{at}]")
            continue
        if parts:
            yield make_message("user", parts, where)
            parts = []
        yield _result(block, f"{where}[{at}]", names)
    if parts or not blocks:
        yield make_message("user", parts, where)


def _result(block: Block, where: str, names: dict[str, str]) -> ChatMessage:
    id = block.tool_use_id
    if id is None:
        raise RequestError(f"{where}.tool_use_id is required", param=where)
    if id not in names:
        raise RequestError(f"{where}: no tool_use block before it has the id {id!r}", param=where)
    content = [] if block.content is None else block.content
    parts: list[str | Media] = [content] if isinstance(content, str) else []
    if not isinstance(content, str):
        for at, one in enumerate(content):
            if one.type == "tool_reference":
                parts.append(f"The tool {one.tool_name} can be called now.")
            else:
                parts += _parts(one, f"{where}.content[{at}]")
    if block.is_error:  # templates have no other place for an error
        first = parts.pop(0) if parts and isinstance(parts[0], str) else ""
        parts.insert(0, f"Error: {first}")
    return replace(make_message("tool", parts, where), name=names[id], tool_call_id=id)


def _assistant(blocks: list[Block], where: str, names: dict[str, str]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # encrypted by another service
            case "tool_use":
                calls.append(_call(block, place))
                names[block.id] = block.name
            case _:
                texts.append(_block_text(block, place))
    content, reasoning = "\n".join(texts), "\n".join(thoughts)
    return ChatMessage("assistant", content, None, tuple(calls), None, reasoning or None)


def _call(block: Block, where: str) -> ToolCall:
    if not block.id or not block.name:
        raise RequestError(f"{where}: a tool_use block needs `id` and `name`", param=where)
    return ToolCall(block.id, block.name, msgspec.json.encode(block.input or {}).decode())


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}[{at}]") for at, block in enumerate(content))


def _parts(block: Block, where: str) -> list[str | Media]:
    """Return the texts and images of a user's block; those of a document begin with its title."""
    if block.type not in ("document", "search_result"):
        return [_part(block, where)]
    source, content, place = block.source, block.content, f"{where}.content"
    about = [block.title, block.context]
    if block.type == "search_result":
        about = [block.title, source if isinstance(source, str) else None]
    elif isinstance(source, Source) and source.type == "text":
        content = source.data
    elif isinstance(source, Source) and source.type == "content":
        content, place = source.content, f"{where}.source.content"
    else:
        raise Unsupported(
            f"{where}: a document's source is of type text or content; files such as PDF cannot be"
            " read here, send their text",
            param=where,
        )
    if content is None:
        raise RequestError(f"{place} is required", param=place)
    parts: list[str | Media] = [one for one in about if one]
    if isinstance(content, str):
        return [*parts, content]
    return parts + [_part(one, f"{place}[{at}]") for at, one in enumerate(content)]


def _part(block: Block, where: str) -> str | Media:
    """Return the text or the image of a user's block."""
    if block.type != "image":
        return _block_text(block, where)
    if not isinstance(block.source, Source):
        raise RequestError(f"{where}.source: an image needs its source", param=where)
    if block.source.type == "url":
        return read_data_uri(block.source.url, f"{where}.source.url")
    if block.source.type != "base64":
        raise Unsupported(f"{where}: an image's source is of type base64 or url", param=where)
    return read_base64(block.source.data, f"{where}.source.data")


def _block_text(block: Block, where: str) -> str:
    if block.type != "text":
        raise Unsupported(f"{where}: this takes text, not {block.type[:40]!r}", param=where)
    if block.text is None:
        raise RequestError(f"{where}: a text block needs `text`", param=where)
    return block.text
