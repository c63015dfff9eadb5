"""Converts an OpenAI body to a `GenerationRequest`, for the endpoints and the chat page."""

from __future__ import annotations

from servekit.gateway.api.openai.request import (
    Prompt,
    chat_messages,
    chat_sampling,
    completion_sampling,
    continues,
    template_arguments,
)
from servekit.gateway.api.openai.schema import ChatRequest, Common, CompletionRequest
from servekit.gateway.generation.generation import GenerationRequest


def chat_request(request: ChatRequest, key: str) -> GenerationRequest:
    """Return the generation request of a chat. Raises RequestError for a wrong body."""
    generation = GenerationRequest(
        model=request.model,
        params=chat_sampling(request),
        messages=chat_messages(request.messages),
        template=template_arguments(request),
        continues=continues(request),
    )
    if request.tools or request.tool_choice is not None:
        generation.tools = request.tools or []
        generation.tool_choice = request.tool_choice
        generation.parallel = request.parallel_tool_calls is not False
    if request.separate_reasoning is False:
        generation.reasoning = False
    _add_common(generation, request, key)
    return generation


def completion_request(
    request: CompletionRequest, prompts: list[Prompt], key: str
) -> GenerationRequest:
    """Return the generation request of completions of `prompts`. Raises RequestError."""
    params = completion_sampling(request)
    generation = GenerationRequest(model=request.model, params=params, prompts=prompts)
    _add_common(generation, request, key)
    return generation


def _add_common(generation: GenerationRequest, request: Common, key: str) -> None:
    """Add the fields that both endpoints have; the rare ones cost only the requests with them."""
    generation.stream = bool(request.stream)
    generation.key = key
    generation.timeout_s = request.timeout_s
    if request.n is not None:
        generation.n = request.n
    if request.stream_options is not None:
        generation.follow = bool(request.stream_options.queue_position)
    if request.priority is not None:
        generation.priority = request.priority
    if request.prompt_cache_key is not None:
        generation.session = request.prompt_cache_key
