"""The endpoints that do not run through FastAPI, as the OpenAPI document tells of them.

What they take is read off the very types that decode it; what stands here is what the types do not
say: an example of a request, one of an answer, and how errors look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from servekit.gateway import anthropic_asking, legacy, lora, ollama_asking
from servekit.gateway.responses_schema import ResponsesRequest
from servekit.gateway.schema import ChatRequest, CompletionRequest
from servekit.gateway.vectors import DetokenizeRequest, EmbeddingRequest, TokenizeRequest

MODEL = "smollm2-135m-instruct"
SAID = "The capital of France is Paris."
_ASKED = {"role": "user", "content": "What is the capital of France?"}
_USAGE = {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45}
_OLLAMA_END = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 301000000,
    "load_duration": 0,
    "prompt_eval_count": 37,
    "prompt_eval_duration": 91000000,
    "eval_count": 8,
    "eval_duration": 210000000,
}
_OLLAMA_HEAD = {"model": MODEL, "created_at": "2026-11-21T12:00:00.000000Z"}

Envelope = Literal["OpenAI", "Anthropic", "Ollama", "HuixiangDou"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint that takes POST."""

    path: str
    takes: type
    summary: str
    tag: str
    asked: dict[str, Any]
    answer: dict[str, Any]
    streams: str = ""  # the content type of its streams
    envelope: Envelope = "OpenAI"
    text: str = ""  # the answer, where it is no JSON


_CHAT_ANSWER = {
    "id": "chatcmpl-7b35f4db8396fb0f9c5bde0e",
    "object": "chat.completion",
    "created": 1795262400,
    "model": MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": SAID, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ],
    "usage": _USAGE,
}
_COMPLETION_ANSWER = {
    "id": "cmpl-8c8b8b6dc2369d51eb0e80d1",
    "object": "text_completion",
    "created": 1795262400,
    "model": MODEL,
    "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
}
_RESPONSE_ANSWER = {
    "id": "resp_0f9c5bde0e7b35f4db8396fb",
    "object": "response",
    "created_at": 1795262400,
    "status": "completed",
    "model": MODEL,
    "output": [
        {
            "id": "msg_db8396fb0f9c5bde0e7b35f4",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": SAID, "annotations": [], "logprobs": []}],
        }
    ],
    "usage": {"input_tokens": 37, "output_tokens": 8, "total_tokens": 45},
}
_MESSAGE_ANSWER = {
    "id": "msg_52e377a07e6afcd91facea00",
    "type": "message",
    "role": "assistant",
    "model": MODEL,
    "content": [{"type": "text", "text": SAID}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 37, "output_tokens": 8},
}

OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        ChatRequest,
        "A chat completion",
        "OpenAI",
        {"model": MODEL, "messages": [_ASKED], "max_tokens": 64},
        _CHAT_ANSWER,
        "text/event-stream",
    ),
    Operation(
        "/v1/completions",
        CompletionRequest,
        "A completion",
        "OpenAI",
        {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 16},
        _COMPLETION_ANSWER,
        "text/event-stream",
    ),
    Operation(
        "/v1/responses",
        ResponsesRequest,
        "A response; none is kept",
        "OpenAI",
        {"model": MODEL, "input": "What is the capital of France?", "max_output_tokens": 64},
        _RESPONSE_ANSWER,
        "text/event-stream",
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
    ),
    Operation(
        "/tokenize",
        TokenizeRequest,
        "The tokens of a prompt, or of a conversation by the model's template",
        "tokens",
        {"model": MODEL, "prompt": "Hello world"},
        {"count": 2, "max_model_len": 8192, "tokens": [19556, 905]},
    ),
    Operation(
        "/detokenize",
        DetokenizeRequest,
        "The text of tokens",
        "tokens",
        {"model": MODEL, "tokens": [19556, 905]},
        {"prompt": "Hello world"},
    ),
    Operation(
        "/v1/load_lora_adapter",
        lora.LoadLoraAdapterRequest,
        "Load an adapter on all workers of a model, or on none",
        "adapters",
        {"lora_name": "sql", "lora_path": "/adapters/sql"},
        {},
        text="Success: LoRA adapter 'sql' added successfully.",
    ),
    Operation(
        "/v1/unload_lora_adapter",
        lora.UnloadLoraAdapterRequest,
        "Unload an adapter, once its requests are done",
        "adapters",
        {"lora_name": "sql"},
        {},
        text="Success: LoRA adapter 'sql' removed successfully.",
    ),
    Operation(
        "/v1/messages",
        anthropic_asking.MessagesRequest,
        "A message",
        "Anthropic",
        {"model": MODEL, "max_tokens": 64, "messages": [_ASKED]},
        _MESSAGE_ANSWER,
        "text/event-stream",
        "Anthropic",
    ),
    Operation(
        "/v1/messages/count_tokens",
        anthropic_asking.CountRequest,
        "How many tokens a prompt has",
        "Anthropic",
        {"model": MODEL, "messages": [_ASKED]},
        {"input_tokens": 37},
        envelope="Anthropic",
    ),
    Operation(
        "/api/chat",
        ollama_asking.ChatRequest,
        "A chat, streamed unless `stream` is false",
        "Ollama",
        {"model": MODEL, "messages": [_ASKED], "stream": False},
        _OLLAMA_HEAD | {"message": {"role": "assistant", "content": SAID}} | _OLLAMA_END,
        "application/x-ndjson",
        "Ollama",
    ),
    Operation(
        "/api/generate",
        ollama_asking.GenerateRequest,
        "An answer to a prompt, streamed unless `stream` is false",
        "Ollama",
        {"model": MODEL, "prompt": "What is the capital of France?", "stream": False},
        _OLLAMA_HEAD | {"response": SAID} | _OLLAMA_END,
        "application/x-ndjson",
        "Ollama",
    ),
    Operation(
        "/api/embed",
        ollama_asking.EmbedRequest,
        "Embeddings",
        "Ollama",
        {"model": "bge-small", "input": ["one text", "another"]},
        {"model": "bge-small", "embeddings": [[0.12, -0.03, 0.99]], "prompt_eval_count": 4},
        envelope="Ollama",
    ),
    Operation(
        "/api/embeddings",
        ollama_asking.EmbeddingsRequest,
        "One embedding, in the older form",
        "Ollama",
        {"model": "bge-small", "prompt": "one text"},
        {"embedding": [0.12, -0.03, 0.99]},
        envelope="Ollama",
    ),
    Operation(
        "/api/show",
        ollama_asking.NameRequest,
        "What is known of a model",
        "Ollama",
        {"model": MODEL},
        {"details": {"family": "LlamaForCausalLM"}, "capabilities": ["completion"]},
        envelope="Ollama",
    ),
    Operation(
        "/api/pull",
        ollama_asking.NameRequest,
        "Says that a model is here, if it is",
        "Ollama",
        {"model": MODEL},
        {"status": "success"},
        "application/x-ndjson",
        "Ollama",
    ),
    Operation(
        "/inference",
        legacy.InferenceRequest,
        "An answer, as HuixiangDou's own LLM server gives it",
        "HuixiangDou",
        {"prompt": "What is the capital of France?", "history": []},
        {"text": SAID, "error": ""},
        envelope="HuixiangDou",
    ),
    Operation(
        "/stream",
        legacy.InferenceRequest,
        "The same, streamed",
        "HuixiangDou",
        {"prompt": "What is the capital of France?", "history": []},
        {"text": SAID, "error": ""},
        "text/event-stream",
        "HuixiangDou",
    ),
)
