"""Examples of answers, as the OpenAPI document shows them."""

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
