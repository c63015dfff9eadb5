"""The table of parameters of OpenAI's endpoints, by endpoint and engine."""

from __future__ import annotations

#: The capability that a parameter needs of an engine; every engine accepts the others.
NEEDS = {
    "logit_bias": "logit_bias",
    "min_p": "min_p",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "repetition_penalty": "penalties",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "response_format": "grammar",
    "structured_outputs": "grammar",
    "guided_json": "grammar",
    "guided_regex": "grammar",
    "guided_choice": "grammar",
    "guided_grammar": "grammar",
    "bad_words": "bad_words",
    "stop_token_ids": "stop_token_ids",
    "prompt_logprobs": "prompt_logprobs",
    "text": "grammar",
    "tools": "tools",
    "tool_choice": "tools",
    "parallel_tool_calls": "tools",
}
#: The echo engine has one candidate for each token, so these do not change its choice.
IDLE_FOR_ECHO = {"top_p", "top_k"}


def make_table() -> str:
    """Return a Markdown table: a row for each parameter."""
    from servekit.engines.echo.engine import SERVES
    from servekit.gateway.api.openai.embeddings import EmbeddingRequest
    from servekit.gateway.api.openai.responses_schema import STATEFUL, ResponsesRequest
    from servekit.gateway.api.openai.schema import (
        ChatRequest,
        CompletionRequest,
        unserved_fields,
    )
    from servekit.gateway.api.openapi.schemas import make_schemas

    kinds = (ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingRequest)
    _, components = make_schemas(kinds)
    fields = [components[kind.__name__]["properties"] for kind in kinds]
    unserved = {name for kind in kinds for name in unserved_fields(kind)}
    names = {name for own in fields for name in own} - {"model", *unserved, *STATEFUL}
    head = "parameter | chat | completions | responses | embeddings | transformers | echo"
    lines = [f"| {head} |", "|---|:-:|:-:|:-:|:-:|---|---|"]
    for name in sorted(names):
        marks = ["✓" if name in own else "" for own in fields]
        need = NEEDS.get(name)
        ours = "if its template has tools" if need == "tools" else "✓"
        echos = "✓" if need in (None, *SERVES) else "400"
        if need == "tools":
            echos = "with `tool_parser` in the file"
        texts = [own[name].get("description", "") for own in fields if name in own]
        if all(text.startswith("Has no effect") for text in texts):
            ours = echos = "no effect"
        if name in IDLE_FOR_ECHO:
            echos = "no effect"
        lines.append(f"| `{name}` | {' | '.join(marks)} | {ours} | {echos} |")
    return "\n".join(lines) + "\n"
