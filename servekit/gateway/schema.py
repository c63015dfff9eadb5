"""The bodies of OpenAI's chat completions and completions, and what they become here.

Decoded by msgspec on the hot path; the OpenAPI document is made from the same types. Parameters
that OpenAI knows and servekit does not serve yet are declared, so that they are refused by name
rather than ignored; what OpenAI does not know is ignored, as there.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from servekit.errors import RequestError, Unsupported
from servekit.wire.messages import ChatMessage, SamplingParams

INT64 = 2**63
MAX_STOPS = 32
PLAIN_MAX_TOKENS = 16

Temperature = Annotated[float, Meta(ge=0, le=2, description="0 is greedy")]
Fraction = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Seed = Annotated[int, Meta(ge=-INT64, le=INT64 - 1)]
Priority = Annotated[
    int, Meta(ge=-10, le=10, description="lower is earlier; a step is worth 10 s of waiting")
]
Timeout = Annotated[
    float, Meta(gt=0, description="s, waiting included; capped by the model's own timeout_s")
]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    #: servekit's own: comments like `: queue position 3` while the request waits.
    queue_position: bool | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class InMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None


class Common(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    user: str | None = None
    # servekit's own:
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    # declared to be refused by name where they ask for something:
    n: Any = None
    logprobs: Any = None
    logit_bias: Any = None


class ChatRequest(Common, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[InMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    top_logprobs: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionRequest(Common, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1)]
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


#: Values of the declared-but-unserved parameters that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, [], ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}

Request = TypeVar("Request", ChatRequest, CompletionRequest)
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest)
}
_UNSERVED = {
    kind: tuple(f.name for f in msgspec.structs.fields(kind) if f.name in _NOTHING)
    for kind in (ChatRequest, CompletionRequest)
}
_PATH = re.compile(r" - at `\$\.?(.*)`$")


def decode(kind: type[Request], body: bytes) -> Request:
    """Decode and check a body; raises RequestError that names the field."""
    try:
        request: Request = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    for name in _UNSERVED[kind]:
        value = getattr(request, name)
        if value is not None and not _asks_nothing(value, _NOTHING[name]):
            raise Unsupported(f"{name} is not supported yet; leave it out", param=name)
    return request


def _not_json(body: bytes, error: Exception) -> RequestError:
    try:
        body.decode()
    except UnicodeDecodeError:  # its position would be within some string, not within the body
        return RequestError("the body is not valid UTF-8")
    return RequestError(f"the body is not valid JSON: {error}")


def _asks_nothing(value: Any, allowed: tuple[Any, ...]) -> bool:
    # not `in`: 1 == True, and `False` is no number of choices
    return any(value == other and type(value) is type(other) for other in allowed)


def _explain(text: str) -> RequestError:
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    said = (text[: found.start()] if found else text).replace(" | null`", "`")
    if missing := re.search(r"missing required field `(\w+)`", said):
        name = f"{path}.{missing.group(1)}".lstrip(".")
        return RequestError(f"{name} is required", param=name)
    name = path.replace("[...]", "")
    return RequestError(f"{path or 'the body'}: {said[:1].lower()}{said[1:]}", param=name or None)


# ---------------------------------------------------------------- into our own terms


def sampling(request: Common) -> SamplingParams:
    """The request's sampling, None where it leaves the choice to the model."""
    stop = request.stop
    limit = request.max_tokens
    if isinstance(request, ChatRequest):
        limit = request.max_completion_tokens or limit
    if request.min_tokens and limit is not None:
        _check_min_tokens(request.min_tokens, limit)
    return SamplingParams(
        max_tokens=limit,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(0, request.top_k),
        min_p=request.min_p,
        seed=request.seed,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
    )


def completion_sampling(request: CompletionRequest) -> SamplingParams:
    """As `sampling`; OpenAI's default of 16 tokens applies to plain completions."""
    params = sampling(request)
    if params.max_tokens:
        return params
    _check_min_tokens(params.min_tokens, PLAIN_MAX_TOKENS)
    return msgspec.structs.replace(params, max_tokens=PLAIN_MAX_TOKENS)


def _check_min_tokens(least: int, most: int) -> None:
    if least > most:
        raise RequestError(
            f"min_tokens is {least}, over the limit of {most} tokens; raise max_tokens, too",
            param="min_tokens",
        )


def completion_prompt(request: CompletionRequest) -> str | list[int]:
    """The one prompt: text or token ids. OpenAI takes a list of several, which are refused."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return cast(list[int], prompt)
    if len(kinds) > 1:
        raise RequestError("prompt: text and token ids are mixed in one list", param="prompt")
    if len(prompt) > 1:
        raise Unsupported("several prompts in one request are not supported yet", param="prompt")
    only = cast(str | list[int], prompt[0])
    if only == []:
        raise RequestError("prompt[0]: expected at least one token id", param="prompt")
    return only


def chat_messages(request: ChatRequest) -> list[ChatMessage]:
    """The messages as the chat template gets them; raises RequestError for what is not text."""
    return [_message(message, at) for at, message in enumerate(request.messages)]


def _message(message: InMessage, at: int) -> ChatMessage:
    where = f"messages[{at}].content"
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls:
        raise Unsupported("tool calls are not supported yet", param=f"messages[{at}].tool_calls")
    if isinstance(message.content, str):
        return ChatMessage(role, message.content, message.name)
    if message.content is None:
        raise RequestError(f"{where} is required", param=where)
    return ChatMessage(role, "\n".join(_part(p, where) for p in message.content), message.name)


def _part(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise Unsupported(f"{where}: the model takes text, not {part.type!r}", param=where)
    if part.text is None:
        raise RequestError(f"{where}: a text part needs `text`", param=where)
    return part.text
