"""The body of OpenAI's POST /v1/responses, and its conversion to servekit's types.

Only where `server.store_responses` keeps responses can a request refer to an earlier one.
Source: OpenAI API reference, Responses.
"""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.fields import (
    CONTENT,
    DESCRIPTION,
    FORM,
    QUESTION,
    ROLE,
    SCHEMA,
    TOOLS,
    Ignored,
    ModelName,
    Stream,
    doc,
)
from servekit.gateway.api.images import make_message, read_data_uri, read_text_file
from servekit.gateway.api.openai.request import read_audio, schema_grammar
from servekit.gateway.api.openai.schema import (
    Count,
    Effort,
    InputAudio,
    OneCall,
    Priority,
    SessionKey,
    Temperature,
    Timeout,
    ToolChoice,
    TopLogprobs,
    TopP,
)
from servekit.gateway.api.tool_arguments import object_text
from servekit.gateway.api.unknown_parameters import MOST_NAMES, UNKNOWN, clean_name
from servekit.gateway.generation.generation import GenerationRequest
from servekit.protocol.messages import ChatMessage, Grammar, Media, SamplingParams, ToolCall

_NOT_STORED = "Refused: send the whole conversation, or `previous_response_id`"
Refused = Annotated[Any, Meta(description=_NOT_STORED, extra_json_schema={"enum": [None]})]


class Part(msgspec.Struct, omit_defaults=True):
    """A part of a message, or of the result of a tool."""

    type: Annotated[str, doc("Its type: text, an image, a recording, a file, or a refusal")]
    text: Annotated[str, doc("The text")] | None = None
    image_url: Annotated[str, doc("The image itself, as `data:image/png;base64,…`")] | None = None
    detail: Annotated[str, doc("The resolution that the model sees")] | None = None
    input_audio: Annotated[InputAudio | None, doc("The recording")] = None
    file_data: Annotated[str, doc("A file of text, as `data:text/plain;base64,…`")] | None = None
    filename: Annotated[str, doc("Its name, which the model reads before it")] | None = None
    refusal: Annotated[str, doc("The text of a refusal")] | None = None


class Item(msgspec.Struct):
    """An item of the input. Its `type` decides which of the fields it has."""

    type: str = "message"
    """message, reasoning, function_call or function_call_output; item_reference: the output item of
    this id, where `server.store_responses` keeps its response."""
    role: Annotated[Literal["system", "developer", "user", "assistant"] | None, ROLE] = None
    content: Annotated[str | list[Part] | None, CONTENT] = None
    summary: Annotated[list[Part] | None, doc("The thoughts of reasoning without content")] = None
    id: Annotated[str, doc("The id that the item had")] | None = None
    # of function_call and function_call_output
    call_id: Annotated[str, doc("The id of the call")] | None = None
    name: Annotated[str, doc("The name of the function")] | None = None
    arguments: Annotated[str, doc("The text of a JSON object")] | None = None
    output: Annotated[str | list[Part] | None, doc("The result of the function")] = None


class Function(msgspec.Struct):
    """A tool. Only functions: the others are OpenAI's own services."""

    type: Annotated[str, doc("function; others are left out, and refused without a function")]
    name: Annotated[str, doc("The name: 1 to 64 letters, digits, _ or -")] = ""
    description: Annotated[str, DESCRIPTION] | None = None
    parameters: Annotated[dict[str, Any], doc("The JSON schema of the arguments")] | None = None
    strict: Annotated[bool, doc("Enforce the schema on calls")] | None = None


class Format(msgspec.Struct):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, doc("Has no effect")] | None = None
    schema: Annotated[dict[str, Any] | bool | None, SCHEMA] = None
    strict: Annotated[bool, doc("Has no effect: schemas are always enforced")] | None = None
    description: Annotated[str, doc("Has no effect")] | None = None


class TextOptions(msgspec.Struct):
    """Options of the text."""

    format: Annotated[Format | None, FORM] = None
    verbosity: Annotated[str, doc("Has no effect")] | None = None


class ReasoningOptions(msgspec.Struct):
    """Options of the model's thoughts."""

    effort: Effort | None = None
    summary: str | None = None
    """auto, concise or detailed: the thoughts come as `summary`, as some clients show no others."""
    generate_summary: Ignored = None


_INPUT = doc("A text, or the items of the whole conversation so far", QUESTION)
Items = str | Annotated[list[Item], Meta(min_length=1, max_length=4096)]


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses/input_tokens: what a prompt is made of."""

    input: Annotated[Items | None, _INPUT] = None
    model: ModelName = ""
    instructions: Annotated[str, doc("A system message before the input")] | None = None
    tools: Annotated[list[Function], TOOLS, Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: OneCall | None = None
    text: Annotated[TextOptions | None, doc("Options of the text")] = None
    reasoning: Annotated[ReasoningOptions | None, doc("Options of the model's thoughts")] = None
    truncation: Literal["auto", "disabled"] | None = None
    """Has no effect: an input that is too long is refused."""
    previous_response_id: str | None = None
    """A kept response that the input follows, after the conversation that led to it."""
    # refused by name if they are set:
    conversation: Refused = None
    prompt: Refused = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """Body of POST /v1/responses."""

    input: Annotated[Items, _INPUT]
    stream: Stream | None = None
    max_output_tokens: Annotated[Count, Meta(examples=[64])] | None = None
    """Most tokens to generate, thoughts included."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    metadata: Annotated[dict[str, str], doc("Has no effect; the response has it")] | None = None
    user: Annotated[str, doc("Has no effect")] | None = None
    prompt_cache_key: SessionKey | None = None
    store: bool | None = None
    """false: do not keep it, where `server.store_responses` would."""
    background: bool | None = None
    """true: answer at once, and run it later, where `server.store_responses` is set. Read it by its
    id."""
    include: list[str] | None = None
    """`message.output_text.logprobs` adds log probabilities; others have no effect."""
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_retention: Ignored = None
    stream_options: Ignored = None
    max_tool_calls: Ignored = None
    # servekit's own:
    priority: Priority | None = None
    timeout_s: Timeout | None = None


STATEFUL = ("conversation", "prompt")
#: An item that is kept here as the output of a response, by its id.
REFERENCE = "item_reference"


def ask_of(request: ResponsesRequest, key: str) -> GenerationRequest:
    """Convert a body to a generation request, without what is kept here of its conversation.

    Raises RequestError that names the field.
    """
    asked = prompt_of(request, key)
    asked.params = _params(request)
    asked.stream = bool(request.stream)
    asked.priority = request.priority or 0
    asked.timeout_s = request.timeout_s
    asked.session = request.prompt_cache_key or ""
    return asked


def prompt_of(request: InputTokensRequest, key: str) -> GenerationRequest:
    """Convert what a prompt is made of to a generation request. Raises RequestError."""
    for name in STATEFUL:
        if getattr(request, name):
            raise Unsupported(
                f"{name}: servekit has none; send the whole conversation as input", param=name
            )
    if request.tools:
        request.tools = _choose_functions(request.tools)
    items = items_of(request)
    known = not any(item.type == REFERENCE for item in items)
    return GenerationRequest(
        model=request.model,
        params=SamplingParams(),
        messages=to_messages(request.instructions, items) if known else [],
        tools=[_tool(tool) for tool in request.tools or ()],
        tool_choice=request.tool_choice,
        parallel=request.parallel_tool_calls is not False,
        template=_template(request.reasoning),
        key=key,
    )


def _params(request: ResponsesRequest) -> SamplingParams:
    params = SamplingParams(
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        grammar=_grammar(request.text.format if request.text else None),
    )
    wanted = "message.output_text.logprobs" in (request.include or ())
    if wanted or request.top_logprobs:
        return replace(params, logprobs=request.top_logprobs or 0)
    return params


def _grammar(format: Format | None) -> Grammar | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return Grammar("json_schema", '{"type":"object"}', "text.format")
    if format.schema is None:
        raise RequestError("text.format.schema is required", param="text.format.schema")
    return replace(schema_grammar(format.schema), param="text.format")


def _template(options: ReasoningOptions | None) -> dict[str, Any]:
    if options is None or options.effort is None:
        return {}
    thinks = options.effort != "none"
    return {"reasoning_effort": options.effort, "enable_thinking": thinks, "thinking": thinks}


def _choose_functions(tools: list[Function]) -> list[Function]:
    """Return the tools that are functions; the others are left out beside them, with a warning.

    Agents offer all tools that they know. A request that has no function was made for the others.
    """
    functions = [tool for tool in tools if tool.type == "function"]
    if len(functions) == len(tools):
        return tools
    at, other = next((at, one) for at, one in enumerate(tools) if one.type != "function")
    if not functions or UNKNOWN.policy == "refuse":
        raise Unsupported(
            f"tools[{at}]: {other.type!r} is a service of OpenAI's; servekit has functions only",
            param=f"tools[{at}].type",
        )
    kinds = {clean_name(tool.type) for tool in tools if tool.type != "function"}
    names = [f"tools.{kind}" for kind in sorted(kinds)[:MOST_NAMES]]
    UNKNOWN.warn(f"left out: {', '.join(names)}", names)
    return functions


def _tool(tool: Function) -> dict[str, Any]:
    """Return a tool in the format of chats."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


# ---------------------------------------------------------------- the conversation


def items_of(request: InputTokensRequest) -> list[Item]:
    """Return the items of the input."""
    if request.input is None:
        return []
    if isinstance(request.input, str):
        return [Item(role="user", content=request.input)]
    return request.input


def to_messages(instructions: str | None, items: list[Item], before: int = 0) -> list[ChatMessage]:
    """Return the conversation of items, of which the first `before` are of earlier responses."""
    messages = [ChatMessage("system", instructions)] if instructions else []
    names: dict[str, str] = {}
    for calls, row in groupby(enumerate(items, -before), lambda one: _is_call(one[1])):
        if calls:
            made = tuple([_call(item, f"input[{at}]") for at, item in row])
            for call in made:
                names.setdefault(call.id, call.name)
            _join(messages, ChatMessage("assistant", "", tool_calls=made))
        else:
            for at, item in row:
                _add(messages, names, item, f"input[{at}]")
    return messages


def _is_call(item: Item) -> bool:
    return item.type == "function_call"


def _add(messages: list[ChatMessage], names: dict[str, str], item: Item, where: str) -> None:
    """Add an item that is no call. Reasoning, text and calls of the assistant become one message.

    `names` are those of the called functions, by the ids of the calls.
    """
    if item.type == "message":
        if item.role is None:
            raise RequestError(f"{where}.role is required", param=f"{where}.role")
        role = "system" if item.role == "developer" else item.role
        _join(messages, _message(role, item.content, f"{where}.content"))
    elif item.type == "reasoning":
        field = "summary" if item.summary and not item.content else "content"
        told = getattr(item, field) or ""
        thoughts = _message("assistant", told, f"{where}.{field}").content
        _join(messages, ChatMessage("assistant", "", reasoning=thoughts or None))
    elif item.type == "function_call_output":
        if item.call_id is None or item.output is None:
            raise RequestError(f"{where}: call_id and output are required", param=where)
        result = _message("tool", item.output, f"{where}.output")
        name = names.get(item.call_id)
        messages.append(replace(result, name=name, tool_call_id=item.call_id))
    else:
        raise Unsupported(f"{where}: servekit has no items of type {item.type!r}", param=where)


def _join(messages: list[ChatMessage], new: ChatMessage) -> None:
    if not messages or not _goes_on(messages[-1], new):
        messages.append(new)
        return
    last = messages[-1]
    messages[-1] = replace(
        last, content=last.content + new.content, tool_calls=last.tool_calls + new.tool_calls
    )


def _goes_on(last: ChatMessage, new: ChatMessage) -> bool:
    """Return whether `new` continues the assistant's turn: reasoning, then text, then calls."""
    if last.role != "assistant" or new.role != "assistant" or new.reasoning:
        return False
    return not new.content or not (last.content or last.tool_calls)


def _call(item: Item, where: str) -> ToolCall:
    if not item.name or item.call_id is None:
        raise RequestError(f"{where}: name and call_id are required", param=where)
    return ToolCall(item.call_id, item.name, object_text(item.arguments))


def _message(role: str, content: str | list[Part] | None, where: str) -> ChatMessage:
    if content is None:
        raise RequestError(f"{where} is required", param=where)
    if isinstance(content, str):
        return ChatMessage(role, content)
    parts = [_part(part, f"{where}[{at}]") for at, part in enumerate(content)]
    return make_message(role, parts, where)


def _part(part: Part, where: str) -> str | Media:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type == "input_image":
        if part.image_url is None:  # `file_id` names an upload of OpenAI's
            raise Unsupported(f"{where}: an image needs `image_url`", param=where)
        return read_data_uri(part.image_url, f"{where}.image_url", part.detail)
    if part.type == "input_audio":
        return read_audio(part.input_audio, f"{where}.input_audio")
    if part.type == "input_file":
        return read_text_file(part.file_data, part.filename, where)
    if part.type not in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
        raise Unsupported(
            f"{where}: parts are of type input_text, input_image, input_audio or input_file, not"
            f" {part.type!r}",
            param=where,
        )
    if part.text is None:
        raise RequestError(f"{where}: a part of type {part.type} needs `text`", param=where)
    return part.text
