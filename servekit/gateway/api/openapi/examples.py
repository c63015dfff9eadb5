"""Examples of answers for the OpenAPI document."""

from __future__ import annotations

MODEL = "smollm2-135m-instruct"
SAID = "The capital of France is Paris."
_USAGE = {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45}
DETAILS = {
    "parent_model": "",
    "format": "safetensors",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "134.5M",
    "quantization_level": "F32",
}

CHAT = {
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
COMPLETION = {
    "id": "cmpl-8c8b8b6dc2369d51eb0e80d1",
    "object": "text_completion",
    "created": 1795262400,
    "model": MODEL,
    "choices": [{"index": 0, "text": " Paris.", "logprobs": None, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
}
RESPONSE = {
    "id": "resp_0f9c5bde0e7b35f4db8396fb",
    "object": "response",
    "created_at": 1795262400,
    "status": "completed",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": 64,
    "metadata": {},
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
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "usage": {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 45,
    },
    "user": None,
}
MESSAGE = {
    "id": "msg_52e377a07e6afcd91facea00",
    "type": "message",
    "role": "assistant",
    "model": MODEL,
    "content": [{"type": "text", "text": SAID}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 37,
        "output_tokens": 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    },
}
_HEAD = {"model": MODEL, "created_at": "2026-11-21T12:00:00.000000Z"}
_END = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 301000000,
    "load_duration": 0,
    "prompt_eval_count": 37,
    "prompt_eval_duration": 91000000,
    "eval_count": 8,
    "eval_duration": 210000000,
}
OLLAMA_CHAT = _HEAD | {"message": {"role": "assistant", "content": SAID}} | _END
OLLAMA_GENERATED = _HEAD | {"response": SAID} | _END

# ---- answers to GET

MODEL_ENTRY = {
    "id": MODEL,
    "object": "model",
    "created": 1795262400,
    "owned_by": "servekit",
    "max_model_len": 8192,
    "engine": "transformers",
    "aliases": ["smollm2"],
    "state": "ready",
    "root": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "parent": None,
    "type": "model",
    "display_name": MODEL,
    "created_at": "2026-11-21T12:00:00Z",
    "lifecycle": "active",
    "max_input_tokens": 8192,
    "max_tokens": 8192,
}
_REPLICA = {
    "name": f"{MODEL}/0",
    "state": "ready",
    "device": "cpu",
    "restarts": 0,
    "progress": None,
    "reason": None,
}
_HEALTH = {
    "ready": True,
    "state": "ready",
    "running": 1,
    "waiting": 0,
    "replicas": [_REPLICA],
    "adapters": {"sql": "serving"},
    "residency": "resident",
    "reason": None,
}
_OLLAMA_MODEL = {
    "name": f"{MODEL}:latest",
    "model": f"{MODEL}:latest",
    "modified_at": "2026-11-21T12:00:00Z",
    "size": 538060032,
    "digest": "9f0d6c1f7a0e4b6f8a3f0c52c5d2f8ad5b1b5a0e8f2c7d1b3a4c6e7f8091a2b3",
    "details": DETAILS,
}
_RUNNING = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": 8192}
READS: dict[str, dict[str, object]] = {
    "/livez": {"status": "ok"},
    "/readyz": {"status": "ready", "models": {MODEL: _HEALTH}},
    "/version": {"version": "0.1.0"},
    "/v1/models": {
        "object": "list",
        "data": [MODEL_ENTRY],
        "has_more": False,
        "first_id": MODEL,
        "last_id": MODEL,
    },
    "/v1/models/{model}": MODEL_ENTRY,
    "/api/tags": {"models": [_OLLAMA_MODEL]},
    "/api/ps": {"models": [_OLLAMA_MODEL | _RUNNING]},
    "/api/version": {"version": "0.12.6", "servekit": "0.1.0"},
}

# ---------------------------------------------------------------- errors

_TOO_HIGH = "temperature: expected `float` <= 2.0"
ERRORS: dict[str, dict[str, object]] = {
    "OpenAI": {
        "error": {
            "message": _TOO_HIGH,
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_request",
        }
    },
    "Anthropic": {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": _TOO_HIGH},
    },
    "Ollama": {"error": "options.top_p: expected `float` <= 1.0"},
    "HuixiangDou": {"text": "", "error": "the prompt is empty"},
}
