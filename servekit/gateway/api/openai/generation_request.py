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
from servekit.gateway.api.openai.schema import ChatRequest, CompletionRequest
from servekit.gateway.generation.generation import GenerationRequest


def chat_request(request: ChatRequest, key: str) -> GenerationRequest:
    """Return the generation request of a chat. Raises RequestError for a wrong body."""
    options = request.stream_options
    return GenerationRequest(
        model=request.model,
        params=chat_sampling(request),
        messages=chat_messages(request.messages),
        n=request.n or 1,
        tools=request.tools or [],
        tool_choice=request.tool_choice,
        parallel=request.parallel_tool_calls is not False,
        template=template_arguments(request),
        continues=continues(request),
        reasoning=request.separate_reasoning is not False,
        stream=bool(request.stream),
        follow=bool(options and options.queue_position),
        key=key,
        priority=request.priority or 0,
        timeout_s=request.timeout_s,
        session=request.prompt_cache_key or "",
    )


def completion_request(
    request: CompletionRequest, prompts: list[Prompt], key: str
) -> GenerationRequest:
    """Return the generation request of completions of `prompts`. Raises RequestError."""
    options = request.stream_options
    return GenerationRequest(
        model=request.model,
        params=completion_sampling(request),
        prompts=prompts,
        n=request.n or 1,
        stream=bool(request.stream),
        follow=bool(options and options.queue_position),
        key=key,
        priority=request.priority or 0,
        timeout_s=request.timeout_s,
        session=request.prompt_cache_key or "",
    )
