"""Construction of OpenAI request bodies from the gateway's requests.

Only parameters of the request or the configuration are sent; the endpoint chooses the rest, and
refuses the parameters it does not know.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from servekit.errors import Unsupported
from servekit.protocol.messages import ChatMessage, Generate, Grammar, Media, SamplingParams

#: Approximate bytes of a body per token, for estimates, and tokens of an image.
BYTES_PER_TOKEN = 4
TOKENS_PER_IMAGE = 1000
#: Switches of chat templates; OpenAI's API has `reasoning_effort` instead.
_SWITCHES = {"enable_thinking", "thinking", "thinking_budget"}
_ANY_OBJECT = '{"type":"object"}'


#: Names of the token limit of chats: OpenAI has renamed it, most others have not.
Limit = Literal["max_tokens", "max_completion_tokens"]


_HEADERS = {"content-type": "application/json", "accept": "text/event-stream, application/json"}


@dataclass(frozen=True, slots=True)
class EndpointTraits:
    """The parameters of this endpoint, from the configuration and the handshake."""

    model: str
    defaults: Mapping[str, float | int]  # the configured `sampling`
    template_arguments: bool = False  # accepts chat_template_kwargs
    usage: bool = True  # accepts stream_options
    limit: Limit = "max_tokens"


@dataclass(frozen=True, slots=True)
class EndpointCall:
    """A request to the endpoint."""

    path: str
    body: bytes
    request: Generate
    at_root: bool = False  # `path` is not below the base of the API

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the request; the endpoint continues the request's trace."""
        trace = self.request.trace
        return _HEADERS | {"traceparent": trace} if trace else _HEADERS

    @property
    def prompt_tokens(self) -> int:
        """Estimated number of prompt tokens."""
        media = [one for message in self.request.messages or () for one in message.media]
        text_bytes = len(self.body) - sum(len(one.data) for one in media) * 4 // 3
        return text_bytes // BYTES_PER_TOKEN + TOKENS_PER_IMAGE * len(media) + 1

    def accepts(self, status: int) -> bool:
        """Return whether a response with this HTTP status is an answer."""
        return status == 200


def build_call(request: Generate, traits: EndpointTraits) -> EndpointCall:
    """Build the request. Raises Unsupported for parameters that OpenAI's API cannot express."""
    body: dict[str, Any] = {"model": traits.model}
    if request.task == "embed":
        body |= {"input": request.inputs, "encoding_format": "float"}
        return EndpointCall("/embeddings", msgspec.json.encode(body), request)
    body["stream"] = True
    if traits.usage:
        body["stream_options"] = {"include_usage": True}
    if request.messages is None:
        # without white space at the end, which would be a token of its own
        body["prompt"] = f"{request.prompt}{request.answered.rstrip()}"
        path = "/completions"
    else:
        body |= _chat_body(request, traits)
        path = "/chat/completions"
    body |= _sampling_body(request, traits)
    return EndpointCall(path, msgspec.json.encode(body), request)


def _chat_body(request: Generate, traits: EndpointTraits) -> dict[str, Any]:
    messages = [_message_body(one) for one in request.messages or ()]
    if answered := request.answered.rstrip():  # templates strip it
        begun = messages.pop()["content"] if request.continues else ""
        messages.append({"role": "assistant", "content": f"{begun}{answered}"})
    body: dict[str, Any] = {"messages": messages}
    if request.tools:
        body["tools"] = request.tools
        if request.must_call:
            body["tool_choice"] = _tool_choice(request)
        if request.one_call:
            body["parallel_tool_calls"] = False
    if request.continues or answered:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body | _template_body(request.template, traits)


def _tool_choice(request: Generate) -> Any:
    if not request.one_call or len(request.tools) > 1:
        return "required"
    return {"type": "function", "function": {"name": request.tools[0]["function"]["name"]}}


def _template_body(given: Mapping[str, Any], traits: EndpointTraits) -> dict[str, Any]:
    """Convert template arguments; unsupported thinking switches are dropped, others are refused."""
    effort = given.get("reasoning_effort")
    body = {"reasoning_effort": effort} if isinstance(effort, str) else {}
    rest = {name: value for name, value in given.items() if name != "reasoning_effort"}
    if traits.template_arguments:
        return body | ({"chat_template_kwargs": rest} if rest else {})
    if unknown := sorted(rest.keys() - _SWITCHES):
        raise Unsupported(
            f"chat_template_kwargs: {unknown[0]!r} can be passed on only to endpoints that have"
            " chat templates; if this one has, `chat_template_kwargs: true` in its options says so",
            param="chat_template_kwargs",
        )
    return body


def _message_body(message: ChatMessage) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.media:
        told["content"] = [_part_body(part) for part in message.parts]
    if message.name is not None:
        told["name"] = message.name
    if message.tool_calls:
        told["content"] = message.content or None
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    return told


def _part_body(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = binascii.b2a_base64(part.data, newline=False).decode()
    if part.modality == "audio":
        format = part.kind.removeprefix("audio/").replace("mpeg", "mp3")
        return {"type": "input_audio", "input_audio": {"data": data, "format": format}}
    detail = {"detail": part.detail} if part.detail else {}
    return {"type": "image_url", "image_url": {"url": f"data:{part.kind};base64,{data}"} | detail}


def _sampling_body(request: Generate, traits: EndpointTraits) -> dict[str, Any]:
    params = request.params
    body = dict(_changed_numbers(params, traits.defaults))
    limit = (
        params.max_tokens if params.max_tokens is not None else traits.defaults.get("max_tokens")
    )
    if limit is not None:
        limit = max(1, int(limit) - len(request.emitted))
        body[traits.limit if request.messages is not None else "max_tokens"] = limit
    if request.emitted and "min_tokens" in body:
        body["min_tokens"] = max(0, body["min_tokens"] - len(request.emitted))
    if params.stop:
        body["stop"] = list(params.stop)
    if params.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in params.logit_bias}
    if params.logprobs is not None:
        chat = {"logprobs": True, "top_logprobs": params.logprobs}
        body |= chat if request.messages is not None else {"logprobs": params.logprobs}
    if params.grammar is not None:
        body["response_format"] = _response_format(params.grammar)
    return body


def _changed_numbers(
    params: SamplingParams, defaults: Mapping[str, float | int]
) -> Iterator[tuple[str, Any]]:
    """Yield the sampling parameters of the request or the configuration that are not neutral."""
    nothing: dict[str, Any] = {
        "temperature": None,
        "top_p": None,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "min_tokens": 0,
    }
    for name, neutral in nothing.items():
        value = getattr(params, name)
        value = defaults.get(name) if value is None else value
        if value is not None and value != neutral:
            yield name, value


def _response_format(grammar: Grammar) -> dict[str, Any]:
    """Convert a grammar to a response format, which the endpoint must follow strictly or refuse."""
    if grammar.kind != "json_schema":
        raise Unsupported(
            f"{grammar.param}: a remote endpoint takes JSON schemas only", param=grammar.param
        )
    if grammar.text == _ANY_OBJECT:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": msgspec.Raw(grammar.text.encode()), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
