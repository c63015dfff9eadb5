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
#: Parameters without effect, accepted for the clients that send them.
IDLE = {"user", "metadata", "truncation", "store", "service_tier", "safety_identifier"}
IDLE |= {"prompt_cache_retention", "guided_decoding_backend", "request_id", "max_tool_calls"}
IDLE |= {"verbosity"}
#: The echo engine has one candidate for each token, so these do not change its choice.
IDLE_FOR_ECHO = {"top_p", "top_k"}


def make_table() -> str:
    """Return a Markdown table: a row for each parameter."""
    from servekit.engines.echo.engine import SERVES
    from servekit.gateway.api.openai.embeddings import EmbeddingRequest
    from servekit.gateway.api.openai.responses_schema import STATEFUL, ResponsesRequest
    from servekit.gateway.api.openai.schema import NOTHING, ChatRequest, CompletionRequest

    kinds = (ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingRequest)
    fields = [kind.__struct_fields__ for kind in kinds]
    names = {name for own in fields for name in own}
    head = "parameter | chat | completions | responses | embeddings | transformers | echo"
    lines = [f"| {head} |", "|---|:-:|:-:|:-:|:-:|---|---|"]
    for name in sorted(names):
        if name in {"model", *NOTHING, *STATEFUL}:
            continue
        marks = ["✓" if name in own else "" for own in fields]
        need = NEEDS.get(name)
        ours = "if its template has tools" if need == "tools" else "✓"
        echos = "✓" if need in (None, *SERVES) else "400"
        if need == "tools":
            echos = "with `tool_parser` in the file"
        if name in IDLE:
            ours = echos = "no effect"
        if name in IDLE_FOR_ECHO:
            echos = "no effect"
        lines.append(f"| `{name}` | {' | '.join(marks)} | {ours} | {echos} |")
    return "\n".join(lines) + "\n"
