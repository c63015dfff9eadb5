"""The bodies of OpenAI's chat completions and completions.

msgspec decodes them on the hot path, and the OpenAPI document is made from the same types.
Parameters of OpenAI's that servekit does not serve are declared, so that they are refused by name
rather than ignored; undeclared ones are reported (`gateway.api.unknown_parameters`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast

import msgspec
from msgspec import Meta

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.unknown_parameters import UNKNOWN

INT64 = 2**63
MAX_STOPS = 32
MAX_WORDS = 1024
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
Choices = Annotated[int, Meta(ge=1, le=128)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PromptEnd = Annotated[
    int,
    Meta(ge=-1, le=2**31 - 1, description="tokens kept of the prompt's end; -1: as many as fit"),
]


class StreamOptions(msgspec.Struct):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None
    #: servekit's own: comments like `: queue position 3` while the request waits.
    queue_position: bool | None = None


class ContentPart(msgspec.Struct):
    """A piece of a message: text."""

    type: str
    text: str | None = None
    refusal: str | None = None


class JsonSchema(msgspec.Struct):
    """What `response_format` asks for where its type is json_schema."""

    name: str = ""
    schema: dict[str, Any] | bool = True
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CalledFunction(msgspec.Struct):
    """What was called, and with what."""

    name: str
    arguments: str = "{}"


class CalledTool(msgspec.Struct):
    """A call that the assistant made in an earlier turn."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class StructuredOutputs(msgspec.Struct):
    """vLLM's: one of these says which form the answer has."""

    #: A JSON schema, as an object or as its text.
    json: dict[str, Any] | str | None = None
    #: A regular expression in the Rust dialect.
    regex: str | None = None
    #: The texts that the answer may be.
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    #: A grammar in llguidance's Lark dialect, or in GBNF with a rule `root`.
    grammar: str | None = None
    json_object: bool | None = None
    # refused by name if they are set:
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None


class InMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    #: The assistant's reasoning, as servekit returned it; some templates show it to the model.
    reasoning_content: str | None = None
    reasoning: str | None = None


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
    # accepted from clients that always send them, without any effect:
    user: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_retention: Any = None
    verbosity: Any = None
    guided_decoding_backend: Any = None
    request_id: Any = None
    #: The session, like the header `X-Session-Id`.
    prompt_cache_key: str | None = None
    n: Choices | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=4096)] | None = None
    # vLLM's:
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_WORDS)] | None = None
    truncate_prompt_tokens: PromptEnd | None = None
    #: The number of alternatives to each of the prompt's tokens; not in streams.
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    structured_outputs: StructuredOutputs | None = None
    #: Older names of the fields of `structured_outputs`.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    guided_grammar: str | None = None
    # servekit's own:
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    # refused by name if they are set:
    guided_whitespace_pattern: Any = None
    allowed_token_ids: Any = None
    use_beam_search: Any = None
    skip_special_tokens: Any = None


class ChatRequest(Common, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[InMessage], Meta(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    #: More arguments of the chat template, such as `{"enable_thinking": false}`.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    #: False leaves the reasoning in `content` as the model wrote it.
    separate_reasoning: bool | None = None
    #: The last message is the beginning of the answer, which the model continues.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # refused by name if they are set:
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionRequest(Common, kw_only=True):
    """Body of POST /v1/completions."""

    #: 0: the prompt alone, for `echo` and `prompt_logprobs`.
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    prompt: (
        str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1, max_length=1048576)]
    )
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    response_format: ResponseFormat | None = None
    # refused by name if they are set:
    suffix: Any = None


#: The harmless values of the parameters that are declared but not served.
NOTHING: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, [], ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "suffix": (None, ""),
    "guided_whitespace_pattern": (None,),
    "allowed_token_ids": (None, []),
    "use_beam_search": (None, False),
    "skip_special_tokens": (None, True),
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
}

_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
}

Request = TypeVar("Request")


_Decoder = msgspec.json.Decoder[Any]


class _Kind(NamedTuple):
    """The decoders of one type of body, and its unserved parameters."""

    strict: _Decoder  # raises for an unknown field
    lenient: _Decoder
    fields: frozenset[str]
    unserved: tuple[str, ...]  # declared, but not served
    asks: Callable[[Any], tuple[Any, ...]]  # returns the values of the unserved parameters
    none: tuple[None, ...]  # their values in nearly all bodies


@cache
def _decoders(kind: Hashable) -> _Kind:
    lenient = cast(type[msgspec.Struct], kind)
    strict = msgspec.defstruct(lenient.__name__, [], bases=(lenient,), forbid_unknown_fields=True)
    fields = [field.encode_name for field in msgspec.structs.fields(lenient)]
    unserved = tuple(name for name in fields if name in NOTHING)
    # attrgetter returns a tuple only for several names
    asks = attrgetter(*unserved) if len(unserved) > 1 else _getter(unserved)
    return _Kind(
        msgspec.json.Decoder(strict),
        msgspec.json.Decoder(lenient),
        frozenset(fields),
        unserved,
        asks,
        (None,) * len(unserved),
    )


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda request: tuple(getattr(request, name) for name in names)


_UNKNOWN_FIELD = "contains unknown field"
_PATH = re.compile(r" - at `\$\.?(.*)`$")


def decode(kind: type[Request], body: bytes) -> Request:
    """Decode and check a body. Raises RequestError that names the field."""
    strict, lenient, fields, unserved, asks, none = _decoders(cast(Hashable, kind))
    try:
        try:
            request: Request = strict.decode(body)
        except msgspec.ValidationError as error:
            if _UNKNOWN_FIELD not in str(error):
                raise
            request = lenient.decode(body)
            UNKNOWN.meet(body, fields)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    if (values := asks(request)) != none:
        for name, value in zip(unserved, values, strict=True):
            refuse_unserved(name, value)
    return request


def refuse_unserved(name: str, value: Any, within: str = "") -> None:
    """Raise Unsupported if a declared but unserved parameter has more than a harmless value."""
    if value is not None and not _asks_nothing(value, NOTHING[name]):
        param = f"{within}{name}"
        raise Unsupported(
            f"{param} is not supported; {_INSTEAD.get(name, 'leave it out')}", param=param
        )


def _not_json(body: bytes, error: Exception) -> RequestError:
    try:
        body.decode()
    except UnicodeDecodeError:  # its position is within some string, not the body
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
