"""The endpoints that bypass FastAPI, as the OpenAPI document describes them.

Request schemas come from the types that decode the requests, and answer schemas from types made for
the document. This module adds the rest: an example of each, and the format of errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from servekit.gateway.api import huixiangdou
from servekit.gateway.api.admin import lora
from servekit.gateway.api.anthropic import request
from servekit.gateway.api.ollama import request as ollama_asking
from servekit.gateway.api.openai.embeddings import (
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from servekit.gateway.api.openai.responses_schema import ResponsesRequest
from servekit.gateway.api.openai.schema import ChatRequest, CompletionRequest
from servekit.gateway.api.openapi import (
    anthropic,
    examples,
    ollama,
    openai,
    responses,
    service,
)
from servekit.gateway.api.openapi.examples import MODEL

_ASKED = {"role": "user", "content": "What is the capital of France?"}

Envelope = Literal["OpenAI", "Anthropic", "Ollama", "HuixiangDou"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One POST endpoint."""

    path: str
    takes: type
    summary: str
    tag: str
    asked: dict[str, Any]
    answer: dict[str, Any] | str  # a string for an answer of plain text
    gives: type
    streams: str = ""  # the content type of its streams
    pieces: tuple[type, ...] = ()  # the types of an event's data, or of a line
    envelope: Envelope = "OpenAI"

    @property
    def marks_its_end(self) -> bool:
        """Return whether a stream ends with `[DONE]`, an event unlike its pieces."""
        return openai.OpenAIError in self.pieces


OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        ChatRequest,
        "A chat completion",
        "OpenAI",
        {"model": MODEL, "messages": [_ASKED], "max_tokens": 64},
        examples.CHAT,
        openai.ChatCompletion,
        "text/event-stream",
        (openai.ChatChunk, openai.OpenAIError),
    ),
    Operation(
        "/v1/completions",
        CompletionRequest,
        "A completion",
        "OpenAI",
        {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 16},
        examples.COMPLETION,
        openai.Completion,
        "text/event-stream",
        (openai.CompletionChunk, openai.OpenAIError),
    ),
    Operation(
        "/v1/responses",
        ResponsesRequest,
        "A response; none is kept",
        "OpenAI",
        {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 64},
        examples.RESPONSE,
        responses.Response,
        "text/event-stream",
        responses.EVENTS,
    ),
    Operation(
        "/v1/embeddings",
        EmbeddingRequest,
        "Embeddings",
        "OpenAI",
        {"model": "bge-small", "input": ["one text", "another"]},
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.12, -0.03, 0.99]}],
            "model": "bge-small",
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        },
        openai.EmbeddingList,
    ),
    Operation(
        "/tokenize",
        TokenizeRequest,
        "The tokens of a prompt, or of a conversation by the model's template",
        "tokens",
        {"model": MODEL, "prompt": "Hello world"},
        {"count": 2, "max_model_len": 8192, "tokens": [19556, 905]},
        openai.Tokens,
    ),
    Operation(
        "/detokenize",
        DetokenizeRequest,
        "The text of tokens",
        "tokens",
        {"model": MODEL, "tokens": [19556, 905]},
        {"prompt": "Hello world"},
        openai.Detokenized,
    ),
    Operation(
        "/v1/load_lora_adapter",
        lora.LoadLoraAdapterRequest,
        "Load an adapter on all workers of a model, or on none",
        "adapters",
        {"lora_name": "sql", "lora_path": "/adapters/sql"},
        "Success: LoRA adapter 'sql' added successfully.",
        str,
    ),
    Operation(
        "/v1/unload_lora_adapter",
        lora.UnloadLoraAdapterRequest,
        "Unload an adapter, once its requests are done",
        "adapters",
        {"lora_name": "sql"},
        "Success: LoRA adapter 'sql' removed successfully.",
        str,
    ),
    Operation(
        "/v1/messages",
        request.MessagesRequest,
        "A message",
        "Anthropic",
        {"model": MODEL, "max_tokens": 64, "messages": [_ASKED]},
        examples.MESSAGE,
        anthropic.AnthropicMessage,
        "text/event-stream",
        anthropic.EVENTS,
        "Anthropic",
    ),
    Operation(
        "/v1/messages/count_tokens",
        request.CountRequest,
        "How many tokens a prompt has",
        "Anthropic",
        {"model": MODEL, "messages": [_ASKED]},
        {"input_tokens": 37},
        anthropic.TokenCount,
        envelope="Anthropic",
    ),
    Operation(
        "/api/chat",
        ollama_asking.ChatRequest,
        "A chat, streamed unless `stream` is false",
        "Ollama",
        {"model": MODEL, "messages": [_ASKED], "stream": False},
        examples.OLLAMA_CHAT,
        ollama.OllamaChat,
        "application/x-ndjson",
        (ollama.OllamaChat, ollama.OllamaError),
        "Ollama",
    ),
    Operation(
        "/api/generate",
        ollama_asking.GenerateRequest,
        "An answer to a prompt, streamed unless `stream` is false",
        "Ollama",
        {"model": MODEL, "prompt": "What is the capital of France?", "stream": False},
        examples.OLLAMA_GENERATED,
        ollama.OllamaGenerated,
        "application/x-ndjson",
        (ollama.OllamaGenerated, ollama.OllamaError),
        "Ollama",
    ),
    Operation(
        "/api/embed",
        ollama_asking.EmbedRequest,
        "Embeddings",
        "Ollama",
        {"model": "bge-small", "input": ["one text", "another"]},
        {
            "model": "bge-small",
            "embeddings": [[0.12, -0.03, 0.99]],
            "total_duration": 31000000,
            "load_duration": 0,
            "prompt_eval_count": 4,
        },
        ollama.OllamaEmbeddings,
        envelope="Ollama",
    ),
    Operation(
        "/api/embeddings",
        ollama_asking.EmbeddingsRequest,
        "One embedding, in the older form",
        "Ollama",
        {"model": "bge-small", "prompt": "one text"},
        {"embedding": [0.12, -0.03, 0.99]},
        ollama.OllamaEmbedding,
        envelope="Ollama",
    ),
    Operation(
        "/api/show",
        ollama_asking.NameRequest,
        "What is known of a model",
        "Ollama",
        {"model": MODEL},
        {
            "modelfile": "# transformers: smollm2\n",
            "parameters": "",
            "template": "",
            "modified_at": "2026-11-21T12:00:00Z",
            "details": examples.DETAILS,
            "model_info": {"general.architecture": "llama", "llama.context_length": 8192},
            "capabilities": ["completion"],
        },
        ollama.OllamaShown,
        envelope="Ollama",
    ),
    Operation(
        "/api/pull",
        ollama_asking.NameRequest,
        "Says that a model is here, if it is",
        "Ollama",
        {"model": MODEL},
        {"status": "success"},
        ollama.OllamaStatus,
        "application/x-ndjson",
        (ollama.OllamaStatus,),
        "Ollama",
    ),
    Operation(
        "/inference",
        huixiangdou.InferenceRequest,
        "An answer, as HuixiangDou's own LLM server gives it",
        "HuixiangDou",
        {"prompt": "What is the capital of France?", "history": []},
        {"text": examples.SAID, "error": ""},
        ollama.LegacyAnswer,
        envelope="HuixiangDou",
    ),
    Operation(
        "/stream",
        huixiangdou.InferenceRequest,
        "The same, streamed",
        "HuixiangDou",
        {"prompt": "What is the capital of France?", "history": []},
        {"text": examples.SAID, "error": ""},
        ollama.LegacyAnswer,
        "text/event-stream",
        (str,),
        "HuixiangDou",
    ),
)

#: The types of the answers to GET, by path.
READS: dict[str, type] = {
    "/livez": service.Live,
    "/readyz": service.Health,
    "/version": service.Version,
    "/v1/models": openai.ModelList,
    "/v1/models/{model}": openai.Model,
    "/api/tags": ollama.OllamaModels,
    "/api/ps": ollama.OllamaRunning,
    "/api/version": ollama.OllamaVersion,
}
#: The types of errors, by `Operation.envelope`.
ENVELOPES: dict[Envelope, type] = {
    "OpenAI": openai.OpenAIError,
    "Anthropic": anthropic.AnthropicError,
    "Ollama": ollama.OllamaError,
    "HuixiangDou": ollama.HuixiangDouError,
}
