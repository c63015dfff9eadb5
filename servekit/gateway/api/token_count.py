"""Counts the tokens of a chat's prompt, for the APIs that have an endpoint for it."""

from __future__ import annotations

from servekit.gateway.api.openai.embeddings import EmbeddingCalls
from servekit.gateway.generation.generation import GenerationRequest
from servekit.gateway.http.request_limits import check_free
from servekit.gateway.routing.preset_route import complete_chat
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.tool_parsing import check_tools, parse_tool_choice
from servekit.protocol.messages import SamplingParams


def queue_count(router: Router, asked: GenerationRequest) -> EmbeddingCalls:
    """Queue the call that counts the prompt of a chat, as the model would read it.

    Its answer has the number as `prompt_tokens`. Raises ServekitError for a wrong request.
    """
    chosen = parse_tool_choice(check_tools(asked.tools), asked.tool_choice).tools
    route = router.find(asked.model)
    messages, template = complete_chat(
        route, asked.messages or [], asked.template, asked.template_defaults
    )
    check_free([*chosen], template, None, router.access.rules.limits)
    more = {
        "task": "tokenize",
        "template": template,
        "continues": asked.continues,
        "tools": [*chosen],
    }
    call = InflightRequest(
        asked.model, SamplingParams(), messages=messages, stream=False, key=asked.key, more=more
    )
    return EmbeddingCalls(router, [call], None)
