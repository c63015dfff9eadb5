"""Anthropic's Messages API: POST /v1/messages, and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from servekit.gateway.api.anthropic.request import (
    CountRequest,
    MessagesRequest,
    conversation,
    sampling,
)
from servekit.gateway.api.anthropic.response import MessageEncoder, encode_error
from servekit.gateway.api.anthropic.response_types import (
    EVENTS,
    AnthropicError,
    AnthropicMessage,
    TokenCount,
)
from servekit.gateway.api.anthropic.tools import choose_own_tools, tool_choice, tools
from servekit.gateway.api.endpoint import EndpointFactory, GenerationEndpoint
from servekit.gateway.api.openai.embeddings import EmbeddingCalls
from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.token_count import queue_count
from servekit.gateway.generation.generation import GenerationRequest
from servekit.gateway.http.asgi import Envelope
from servekit.gateway.http.response import Endpoint, Handler
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import Delta, SamplingParams

_encode = msgspec.json.Encoder().encode


class Anthropic:
    """Anthropic's endpoints by path, as handlers and ASGI routes, and their error formats."""

    def __init__(self, router: Router, max_body_bytes: int) -> None:
        self._router = router
        door = EndpointFactory(max_body_bytes, encode_error)
        self.handlers: dict[str, Handler] = {
            "/v1/messages": GenerationEndpoint(router, self._parse_message).start_answer
        }
        self.routes: dict[str, Endpoint] = {"/v1/messages/count_tokens": door.calls(self._count)}
        paths = (*self.handlers, *self.routes)
        self.envelopes: dict[str, Envelope] = dict.fromkeys(paths, encode_error)

    def _parse_message(self, body: bytes, key: str) -> tuple[GenerationRequest, MessageEncoder]:
        request = decode(MessagesRequest, body)
        request.tools = choose_own_tools(request.tools)
        talk = conversation(request)
        choice, parallel = tool_choice(request.tool_choice, request.tools)
        ask = GenerationRequest(
            model=request.model,
            params=sampling(request),
            messages=talk.messages,
            tools=tools(request.tools, talk.found_tools),
            tool_choice=choice,
            parallel=parallel,
            template=talk.template,
            template_defaults=talk.template_defaults,
            continues=talk.continues,
            stream=bool(request.stream),
            key=key,
        )
        return ask, MessageEncoder(thoughts=talk.thinks, max_tokens=request.max_tokens)

    def _count(
        self, body: bytes, key: str
    ) -> tuple[EmbeddingCalls, Callable[[list[Delta]], bytes]]:
        request = decode(CountRequest, body)
        request.tools = choose_own_tools(request.tools)
        talk = conversation(request)
        choice, _ = tool_choice(request.tool_choice, request.tools)
        asked = GenerationRequest(
            model=request.model,
            params=SamplingParams(),
            messages=talk.messages,
            tools=tools(request.tools, talk.found_tools),
            tool_choice=choice,
            template=talk.template,
            template_defaults=talk.template_defaults,
            continues=talk.continues,
            key=key,
        )
        return queue_count(self._router, asked), _count_of


def _count_of(answers: list[Delta]) -> bytes:
    return _encode(TokenCount(answers[0].prompt_tokens))


_operation = partial(Operation, tag="Anthropic", error=AnthropicError)
OPERATIONS = (
    _operation("/v1/messages", "A message", MessagesRequest, AnthropicMessage, EVENTS),
    _operation(
        "/v1/messages/count_tokens", "The number of tokens of a prompt", CountRequest, TokenCount
    ),
)
