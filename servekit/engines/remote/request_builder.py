"""What the endpoint is asked: OpenAI's bodies, from a request as it came.

Only what the request or the file says is sent; the rest is the endpoint's own choice. What it does
not know it may refuse, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from servekit.errors import Unsupported
from servekit.protocol.messages import ChatMessage, Generate, Grammar, SamplingParams

#: Bytes of a body for each token, roughly, where only the endpoint could tell.
BYTES_PER_TOKEN = 4
#: Switches that chat templates know; OpenAI's API has `reasoning_effort` instead.
_SWITCHES = {"enable_thinking", "thinking", "thinking_budget"}
_ANY_OBJECT = '{"type":"object"}'


#: What the most tokens of a chat's answer are called: OpenAI has renamed it, most others have not.
Limit = Literal["max_tokens", "max_completion_tokens"]


_HEADERS = {"content-type": "application/json", "accept": "text/event-stream, application/json"}


@dataclass(frozen=True, slots=True)
class EndpointTraits:
    """How this endpoint wants to be asked, as the file says and its first answer has shown."""

    model: str
    defaults: Mapping[str, float | int]  # of the file's `sampling`
    template_arguments: bool = False  # it takes chat_template_kwargs
    usage: bool = True  # it takes stream_options
    limit: Limit = "max_tokens"


@dataclass(frozen=True, slots=True)
class Errand:
    """One request to the endpoint."""

    path: str
    body: bytes
    request: Generate

    @property
    def headers(self) -> dict[str, str]:
        """Of this request; the trace that it is of goes on at the endpoint."""
        trace = self.request.trace
        return _HEADERS | {"traceparent": trace} if trace else _HEADERS

    @property
    def tokens(self) -> int:
        """About how many tokens the prompt has."""
        return len(self.body) // BYTES_PER_TOKEN + 1


def errand(request: Generate, manner: EndpointTraits) -> Errand:
    """Raises Unsupported for what has no form in OpenAI's API."""
    body: dict[str, Any] = {"model": manner.model}
    if request.task == "embed":
        body |= {"input": request.inputs, "encoding_format": "float"}
        return Errand("/embeddings", msgspec.json.encode(body), request)
    body["stream"] = True
    if manner.usage:
        body["stream_options"] = {"include_usage": True}
    if request.messages is None:
        body["prompt"] = request.prompt
        path = "/completions"
    else:
        body |= _conversation(request, manner)
        path = "/chat/completions"
    body |= _sampling(request, manner)
    return Errand(path, msgspec.json.encode(body), request)


def _conversation(request: Generate, manner: EndpointTraits) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [_message(one) for one in request.messages or ()]}
    if request.tools:
        body["tools"] = request.tools
        if request.must_call:
            body["tool_choice"] = _tool_choice(request)
        if request.one_call:
            body["parallel_tool_calls"] = False
    if request.continues:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body | _template(request.template, manner)


def _tool_choice(request: Generate) -> Any:
    if not request.one_call or len(request.tools) > 1:
        return "required"
    return {"type": "function", "function": {"name": request.tools[0]["function"]["name"]}}


def _template(given: Mapping[str, Any], manner: EndpointTraits) -> dict[str, Any]:
    """Thinking switches are wishes, and dropped where they cannot be told; the rest is refused."""
    effort = given.get("reasoning_effort")
    body = {"reasoning_effort": effort} if isinstance(effort, str) else {}
    rest = {name: value for name, value in given.items() if name != "reasoning_effort"}
    if manner.template_arguments:
        return body | ({"chat_template_kwargs": rest} if rest else {})
    if unknown := sorted(rest.keys() - _SWITCHES):
        raise Unsupported(
            f"chat_template_kwargs: {unknown[0]!r} can be passed on only to endpoints that have"
            " chat templates; if this one has, `chat_template_kwargs: true` in its options says so",
            param="chat_template_kwargs",
        )
    return body


def _message(message: ChatMessage) -> dict[str, Any]:
    told: dict[str, Any] = {"role": message.role, "content": message.content}
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


def _sampling(request: Generate, manner: EndpointTraits) -> dict[str, Any]:
    params = request.params
    body = dict(_numbers(params, manner.defaults))
    limit = (
        params.max_tokens if params.max_tokens is not None else manner.defaults.get("max_tokens")
    )
    if limit is not None:
        body[manner.limit if request.messages is not None else "max_tokens"] = limit
    if params.stop:
        body["stop"] = list(params.stop)
    if params.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in params.logit_bias}
    if params.logprobs is not None:
        chat = {"logprobs": True, "top_logprobs": params.logprobs}
        body |= chat if request.messages is not None else {"logprobs": params.logprobs}
    if params.grammar is not None:
        body["response_format"] = _format(params.grammar)
    return body


def _numbers(
    params: SamplingParams, defaults: Mapping[str, float | int]
) -> Iterator[tuple[str, Any]]:
    """What was said of them, by the request or by the file, and means something."""
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


def _format(grammar: Grammar) -> dict[str, Any]:
    """Kept to strictly, or refused by the endpoint: as everywhere here."""
    if grammar.kind != "json_schema":
        raise Unsupported(
            f"{grammar.param}: a remote endpoint takes JSON schemas only", param=grammar.param
        )
    if grammar.text == _ANY_OBJECT:
        return {"type": "json_object"}
    schema = {"name": "answer", "schema": msgspec.Raw(grammar.text.encode()), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
