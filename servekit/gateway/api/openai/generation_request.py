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
        n=request.n or 1,
        template=template_arguments(request),
        continues=continues(request),
        stream=bool(request.stream),
        follow=_follows(request),
        session=request.prompt_cache_key or "",
        key=key,
        priority=request.priority or 0,
        timeout_s=request.timeout_s,
    )
    if request.tools or request.tool_choice is not None:
        generation.tools = request.tools or []
        generation.tool_choice = request.tool_choice
        generation.parallel = request.parallel_tool_calls is not False
    if request.separate_reasoning is False:
        generation.reasoning = False
    return generation


def completion_request(
    request: CompletionRequest, prompts: list[Prompt], key: str
) -> GenerationRequest:
    """Return the generation request of completions of `prompts`. Raises RequestError."""
    return GenerationRequest(
        model=request.model,
        params=completion_sampling(request),
        prompts=prompts,
        n=request.n or 1,
        stream=bool(request.stream),
        follow=_follows(request),
        session=request.prompt_cache_key or "",
        key=key,
        priority=request.priority or 0,
        timeout_s=request.timeout_s,
    )


def _follows(request: Common) -> bool:
    options = request.stream_options
    return options is not None and bool(options.queue_position)
