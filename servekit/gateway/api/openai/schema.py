"""The bodies of OpenAI's chat completions and completions.

msgspec decodes them on the hot path, and the OpenAPI document is made from the same types.
Parameters of OpenAI's that servekit does not serve are declared, so that they are refused by name
rather than ignored; undeclared ones are reported (`gateway.api.unknown_parameters`).
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Sequence
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args

import msgspec
from msgspec import Meta, inspect

from servekit.errors import RequestError, Unsupported
from servekit.gateway.api.fields import (
    CONTENT,
    FORM,
    ROLE,
    SCHEMA,
    Ignored,
    ModelName,
    Stream,
    Tools,
    doc,
    unserved,
)
from servekit.gateway.api.unknown_parameters import UNKNOWN, refusing

INT64 = 2**63
MAX_STOPS = 32
MAX_WORDS = 1024
PLAIN_MAX_TOKENS = 16

INT32 = 2**31
Temperature = Annotated[float, doc("0 is greedy; the default is the model's own", ge=0, le=2)]
TopP = Annotated[
    float,
    doc("Sample from the most probable tokens that together have this probability", gt=0, le=1),
]
MinP = Annotated[
    float,
    doc("Sample from tokens with at least this share of the best one's probability", ge=0, le=1),
]
TOP_K = doc("Sample from this many most probable tokens; 0 and -1: from all")
PresencePenalty = Annotated[
    float, doc("Subtracted from the logit of each token that the answer has already", ge=-2, le=2)
]
FrequencyPenalty = Annotated[
    float, doc("Subtracted from a token's logit for each time it is in the answer", ge=-2, le=2)
]
RepetitionPenalty = Annotated[
    float, doc("Divides the logits of tokens in prompt and answer; 1 is off", gt=0, le=100)
]
Count = Annotated[int, Meta(ge=1, le=INT32 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)],
    doc(
        "The answer ends before the first of these strings. `server.limits.stop_strings` may allow"
        " fewer. They do not end a tool call that `tool_choice` requires"
    ),
]
Seed = Annotated[int, Meta(ge=-INT64, le=INT64 - 1)]
Priority = Annotated[
    int,
    doc("servekit's own: lower is earlier; a step is worth ten seconds of waiting", ge=-10, le=10),
]
Timeout = Annotated[
    float,
    doc("servekit's own: seconds, waiting included; at most the model's own `timeout_s`", gt=0),
]
SessionKey = Annotated[
    str,
    doc(
        "Requests with the same key go to the same replica, unless it is busier than the others."
        " The header `X-Session-Id` does the same, and takes precedence"
    ),
]
Choices = Annotated[int, Meta(ge=1, le=128)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Whole = Annotated[int, Meta(ge=0, le=INT32 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=INT32 - 1)]
TopLogprobs = Annotated[
    int, doc("Also return this many of the most probable tokens; needs `logprobs`", ge=0, le=20)
]
ToolChoice = Annotated[
    str | dict[str, Any], doc("`none`, `auto`, `required`, a function by name, or `allowed_tools`")
]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    doc("Passed to the chat template; `none` also turns thinking off"),
]
OneCall = Annotated[bool, doc("false: one call at most")]
TemplateArguments = Annotated[
    dict[str, Any], doc('More arguments of the chat template, as in `{"enable_thinking": false}`')
]
Inputs = (
    str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1, max_length=1048576)]
)
OneOf = Annotated[list[str], doc("The texts that the answer may be", min_length=1, max_length=4096)]


class StreamOptions(msgspec.Struct):
    """The contents of a stream besides the answer."""

    include_usage: bool | None = None
    """Send a last chunk, without choices, with the token counts."""
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, each chunk has the token counts so far."""
    queue_position: bool | None = None
    """servekit's own: send a comment for each new position in the queue."""
    include_obfuscation: Ignored = None


class ImageUrl(msgspec.Struct):
    """An image."""

    url: str
    """The image itself, as `data:image/png;base64,…`: PNG, JPEG, WebP or GIF. Addresses are
    refused: nothing is fetched."""
    detail: (
        Annotated[str, doc("The resolution that the model sees; few servers heed it")] | None
    ) = None


class InputAudio(msgspec.Struct):
    """A recording."""

    data: Annotated[str, doc("The file, in base64: WAV, MP3, FLAC or Ogg")]
    format: Annotated[str, doc("Has no effect: the file tells it", "wav")] = ""


class AudioUrl(msgspec.Struct):
    """A recording, as vLLM has it."""

    url: Annotated[str, doc("The file, as data:audio/wav;base64,…")]


class FileData(msgspec.Struct):
    """A file of text."""

    file_data: Annotated[str, doc("The file, as `data:text/plain;base64,…`")] | None = None
    filename: Annotated[str, doc("Its name, which the model reads before it")] | None = None


class ContentPart(msgspec.Struct):
    """A part of a message: text, an image, a recording or a file."""

    type: Annotated[
        str,
        Meta(
            extra_json_schema={
                "enum": ["text", "image_url", "input_audio", "audio_url", "file", "refusal"]
            }
        ),
    ]
    """The type of the part."""
    text: Annotated[str, doc("The text")] | None = None
    image_url: Annotated[ImageUrl | str, doc("The image")] | None = None
    input_audio: Annotated[InputAudio | None, doc("The recording")] = None
    audio_url: Annotated[AudioUrl | str, doc("The recording")] | None = None
    file: Annotated[FileData | None, doc("The file, whose text the model reads")] = None
    refusal: Annotated[str, doc("The text of a refusal")] | None = None


class JsonSchema(msgspec.Struct):
    """The schema of a `response_format` of type json_schema."""

    name: Annotated[str, doc("Has no effect")] = ""
    schema: Annotated[dict[str, Any] | bool, SCHEMA] = True
    strict: Annotated[bool, doc("Has no effect: schemas are always enforced")] | None = None
    description: Annotated[str | None, doc("Has no effect")] = None


class ResponseFormat(msgspec.Struct):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema | None, doc("The schema, for type `json_schema`")] = None


class CalledFunction(msgspec.Struct):
    """The function of a call, and its arguments."""

    name: Annotated[str, doc("The name of the function")]
    arguments: Annotated[str, doc("The text of a JSON object")] = "{}"


class CalledTool(msgspec.Struct):
    """A call that the assistant made in an earlier turn."""

    function: Annotated[CalledFunction, doc("The function and its arguments")]
    id: Annotated[str, doc("The id that the answer had")] = ""
    type: Literal["function"] = "function"


class StructuredOutputs(msgspec.Struct):
    """vLLM's constraint on the answer: exactly one of these fields."""

    json: Annotated[dict[str, Any] | str | None, doc("A JSON schema, or its text")] = None
    regex: str | None = None
    """A regular expression in the Rust dialect, for the whole answer."""
    choice: OneOf | None = None
    grammar: str | None = None
    """A grammar in llguidance's Lark dialect, or in GBNF with a rule `root`."""
    json_object: Annotated[bool, doc("Any JSON object")] | None = None
    structural_tag: Annotated[Any, unserved()] = None
    whitespace_pattern: Annotated[Any, unserved()] = None
    disable_any_whitespace: Annotated[Any, unserved(False)] = None
    disable_additional_properties: Annotated[Any, unserved(False)] = None


class InMessage(msgspec.Struct):
    """A message of a conversation."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool", "function"], ROLE]
    content: Annotated[str | list[ContentPart] | None, CONTENT] = None
    name: Annotated[str, doc("The name of the speaker, tool or function")] | None = None
    tool_calls: list[CalledTool] | None = None
    """The calls that the assistant made in this turn."""
    tool_call_id: Annotated[str, doc("The id of the call that this answers")] | None = None
    refusal: Annotated[str, doc("The text of a refusal")] | None = None
    reasoning_content: str | None = None
    """The assistant's thoughts, as servekit returned them; some templates show them."""
    reasoning: Annotated[str, doc("Another name of `reasoning_content`")] | None = None


Messages = Annotated[
    list[InMessage],
    doc(
        "The conversation. `server.limits.messages` may allow fewer messages",
        min_length=1,
        max_length=4096,
    ),
]


class Common(msgspec.Struct, kw_only=True):
    """The fields of both endpoints."""

    model: ModelName = ""
    stream: Stream | None = None
    stream_options: Annotated[StreamOptions | None, doc("Options of a stream")] = None
    max_tokens: Annotated[Count, Meta(examples=[64])] | None = None
    """Most tokens to generate; together with the prompt they have to fit into the context."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, TOP_K, Meta(ge=-1, le=INT32 - 1)] | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    """The same seed gives the same answer; each of the `n` choices has the next seed."""
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    """Generate `max_tokens` tokens; a `response_format` still ends where it is complete."""
    min_tokens: Whole | None = None
    """Least tokens to generate, up to `max_tokens`; a `response_format` ends once complete."""
    user: Annotated[str, doc("Has no effect")] | None = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_retention: Ignored = None
    verbosity: Ignored = None
    guided_decoding_backend: Ignored = None
    request_id: Any = None
    """Has no effect; the header `X-Request-Id` names a request."""
    prompt_cache_key: SessionKey | None = None
    n: Choices | None = None
    """Number of choices, each a request of its own in the queue."""
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=4096)] | None = None
    """Added to the logits of tokens, by token id (see /tokenize); 4096 at most."""
    # vLLM's:
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_WORDS)] | None = None
    """The answer ends before the first of these tokens; `stop_reason` names it."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string or token that ended the answer as a part of it."""
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_WORDS)] | None = None
    """Words that the answer never has, neither at its beginning nor after a space."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32 - 1)] | None = None
    """Keep this many tokens of the prompt's end; -1: as many as fit beside `max_tokens`; 0: all."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Return the log probabilities of the prompt's tokens, and of this many alternatives to each.

    Not in a stream.
    """
    structured_outputs: Annotated[StructuredOutputs | None, FORM] = None
    guided_json: dict[str, Any] | str | None = None
    """The older name of `structured_outputs.json`."""
    guided_regex: str | None = None
    """The older name of `structured_outputs.regex`."""
    guided_choice: OneOf | None = None
    """The older name of `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """The older name of `structured_outputs.grammar`."""
    guided_whitespace_pattern: Annotated[Any, unserved()] = None
    allowed_token_ids: Annotated[Any, unserved([])] = None
    use_beam_search: Annotated[Any, unserved(False)] = None
    skip_special_tokens: Annotated[Any, unserved(True)] = None
    # servekit's own:
    priority: Priority | None = None
    timeout_s: Timeout | None = None


class ChatRequest(Common, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`; it takes precedence."""
    logprobs: Annotated[bool, doc("Return the log probabilities of the tokens")] | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: Annotated[ResponseFormat | None, FORM] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: OneCall | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Effort | None = None
    separate_reasoning: bool | None = None
    """servekit's own; false: leave the thoughts in `content`, as the model wrote them."""
    continue_final_message: bool | None = None
    """Continue the last message, which is the beginning of the assistant's answer."""
    add_generation_prompt: bool | None = None
    """false only with `continue_final_message`."""
    functions: Annotated[Any, unserved([], instead="use tools")] = None
    function_call: Annotated[Any, unserved("none", "auto", instead="use tool_choice")] = None
    audio: Annotated[Any, unserved()] = None
    modalities: Annotated[Any, unserved([], ["text"])] = None
    prediction: Annotated[Any, unserved()] = None
    web_search_options: Annotated[Any, unserved()] = None


class CompletionRequest(Common, kw_only=True):
    """Body of POST /v1/completions."""

    max_tokens: Annotated[int, Meta(ge=0, le=INT32 - 1, examples=[16])] | None = None
    """Most tokens to generate; together with the prompt they have to fit into the context.

    0 generates none, for `echo` and `prompt_logprobs`.
    """
    prompt: Annotated[Inputs, Meta(examples=["The capital of France is"])]
    """A text, several, or token ids. The number of prompts times `n` is 128 at most."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Return log probabilities, and this many of the most probable tokens."""
    echo: bool | None = None
    """Begin the answer with the prompt, and `logprobs` with those of its tokens."""
    best_of: Annotated[Choices, doc("Not supported, except with the value of `n`")] | None = None
    response_format: Annotated[ResponseFormat | None, FORM] = None
    suffix: Annotated[Any, unserved("")] = None


Request = TypeVar("Request")


_Decoder = msgspec.json.Decoder[Any]
#: The harmless values of an unserved parameter, and what to do instead.
Mark = dict[str, Any]


class _Kind(NamedTuple):
    """The decoders of one type of body, and the marks of its unserved parameters."""

    strict: _Decoder  # raises for an unknown field
    lenient: _Decoder
    unserved: dict[str, Mark]  # declared, but not served
    asks: Callable[[Any], tuple[Any, ...]]  # returns the values of the unserved parameters
    none: tuple[None, ...]  # their values in nearly all bodies


@cache
def _decoders(kind: Any) -> _Kind:
    lenient: type[msgspec.Struct] = kind
    unserved = unserved_fields(lenient)
    # attrgetter returns a tuple only for several names
    asks = attrgetter(*unserved) if len(unserved) > 1 else _getter(unserved)
    return _Kind(
        msgspec.json.Decoder(refusing(lenient)),
        msgspec.json.Decoder(lenient),
        unserved,
        asks,
        (None,) * len(unserved),
    )


def unserved_fields(kind: type[msgspec.Struct]) -> dict[str, Mark]:
    """Return what `fields.unserved` says of the fields of a type, by name."""
    return {
        field.name: mark.extra
        for field in msgspec.structs.fields(kind)
        for mark in get_args(field.type)[1:]
        if isinstance(mark, Meta) and mark.extra
    }


def _getter(names: Collection[str]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda request: tuple(getattr(request, name) for name in names)


_UNKNOWN_FIELD = "contains unknown field"
_PATH = re.compile(r" - at `\$\.?(.*)`$")


def decode(kind: type[Request], body: bytes) -> Request:
    """Decode and check a body. Raises RequestError that names the field."""
    # mypy takes no type for hashable, and `cast` would cost a call in each request
    strict, lenient, unserved, asks, none = _decoders(kind)  # type: ignore[arg-type]
    try:
        try:
            request: Request = strict.decode(body)
        except msgspec.ValidationError as error:
            if _UNKNOWN_FIELD not in str(error):
                raise
            request = lenient.decode(body)
            UNKNOWN.check_body(body, cast(type[msgspec.Struct], kind))
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(body, error) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    if asks(request) != none:
        refuse_unserved(request, unserved)
    return request


def refuse_unserved(request: Any, unserved: dict[str, Mark], within: str = "") -> None:
    """Raise Unsupported if an unserved parameter has more than a harmless value."""
    for name, mark in unserved.items():
        if not _asks_nothing(getattr(request, name), mark["harmless"]):
            param = f"{within}{name}"
            raise Unsupported(f"{param} is not supported; {mark['instead']}", param=param)


#: What a body begins with that is no JSON, and what to do about it.
_OTHER_FORMS = {
    b"\x1f\x8b": "is compressed (gzip); send it as it is, without Content-Encoding",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd); send it as it is, without Content-Encoding",
    BOM_UTF8: "begins with a byte order mark; leave it out",
}


def _not_json(body: bytes, error: Exception) -> RequestError:
    if not body:
        return RequestError("the body is empty; send a JSON object")
    for begin, said in _OTHER_FORMS.items():
        if body.startswith(begin):
            return RequestError(f"the body {said}")
    try:
        body.decode()
    except UnicodeDecodeError:  # its position is within some string, not the body
        return RequestError("the body is not valid UTF-8")
    return RequestError(f"the body is not valid JSON: {error}")


def _asks_nothing(value: Any, allowed: tuple[Any, ...]) -> bool:
    # not `in`: 1 == True, and `False` is no number of choices
    return any(value == other and type(value) is type(other) for other in allowed)


def _explain(text: str, kind: type) -> RequestError:
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    said = (text[: found.start()] if found else text).replace(" | null`", "`")
    if missing := re.search(r"missing required field `(\w+)`", said):
        name = f"{path}.{missing.group(1)}".lstrip(".")
        return RequestError(f"{name} is required", param=name)
    name = path.replace("[...]", "")
    if wrong := re.fullmatch(r"Invalid enum value (.*)", said):
        steps = re.findall(r"\[[^\]]*\]|[^.\[]+", path)
        if choices := dict.fromkeys(_find_choices(_describe(kind), steps)):
            said = f"{wrong.group(1)} is not one of: {', '.join(map(str, choices))}"
    return RequestError(f"{path or 'the body'}: {said[:1].lower()}{said[1:]}", param=name or None)


@cache
def _describe(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _find_choices(info: inspect.Type, steps: Sequence[str]) -> list[object]:
    """Return the values that a field `steps` below a type may have; [] if they are not listed."""
    match info:
        case inspect.LiteralType() if not steps:
            return [value for value in info.values if value is not None]
        case inspect.UnionType():
            return [choice for one in info.types for choice in _find_choices(one, steps)]
        case inspect.Metadata():
            return _find_choices(info.type, steps)
        case inspect.StructType() if steps:
            found = [one.type for one in info.fields if one.encode_name == steps[0]]
            return _find_choices(found[0], steps[1:]) if found else []
        case inspect.ListType() | inspect.VarTupleType() if steps:
            return _find_choices(info.item_type, steps[1:])
        case inspect.DictType() if steps:
            return _find_choices(info.value_type, steps[1:])
    return []
