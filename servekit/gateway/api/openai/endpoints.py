"""OpenAI's chat completions and completions: bodies to requests and their answer formats."""

from __future__ import annotations

from servekit.gateway.api.endpoint import GenerationEndpoint
from servekit.gateway.api.openai.generation_request import chat_request, completion_request
from servekit.gateway.api.openai.request import check_prompt_logprobs, completion_prompts
from servekit.gateway.api.openai.response import ChatEncoder, CompletionEncoder, StreamUsage
from servekit.gateway.api.openai.response_types import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    OpenAIError,
)
from servekit.gateway.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    decode,
)
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.generation.generation import GenerationRequest
from servekit.gateway.http.response import Handler
from servekit.gateway.routing.router import Router

_NO_USAGE = StreamUsage()


class OpenAI:
    """The two endpoints, as handlers by path."""

    def __init__(self, router: Router) -> None:
        self.handlers: dict[str, Handler] = {
            "/v1/chat/completions": GenerationEndpoint(router, _parse_chat).start_answer,
            "/v1/completions": GenerationEndpoint(router, _parse_completion).start_answer,
        }


def _parse_chat(body: bytes, key: str) -> tuple[GenerationRequest, ChatEncoder]:
    request = decode(ChatRequest, body)
    check_prompt_logprobs(request)
    options = request.stream_options
    usage = _NO_USAGE if options is None else _stream_usage(options)
    encoder = ChatEncoder(usage, bool(request.logprobs), request.prompt_logprobs)
    return chat_request(request, key), encoder


def _parse_completion(body: bytes, key: str) -> tuple[GenerationRequest, CompletionEncoder]:
    request = decode(CompletionRequest, body)
    prompts = completion_prompts(request)
    check_prompt_logprobs(request)
    options = request.stream_options
    usage = _NO_USAGE if options is None else _stream_usage(options)
    echo = bool(request.echo)
    encoder = CompletionEncoder(usage, request.logprobs, echo, request.prompt_logprobs)
    return completion_request(request, prompts, key), encoder


def _stream_usage(options: StreamOptions) -> StreamUsage:
    if not options.include_usage:
        return _NO_USAGE
    return StreamUsage(wanted=True, each=bool(options.continuous_usage_stats))


OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "A chat completion",
        ChatRequest,
        ChatCompletion,
        (ChatChunk, OpenAIError),
    ),
    Operation(
        "/v1/completions",
        "A completion",
        CompletionRequest,
        Completion,
        (CompletionChunk, OpenAIError),
    ),
)
