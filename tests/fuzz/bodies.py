"""Valid bodies of every endpoint that takes one; what is sent is these, mutated or not."""

from __future__ import annotations

from typing import Any

HELLO = [{"role": "user", "content": "hello there"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "does f", "parameters": SCHEMA},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED = '<think>so</think>well <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "call f"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "user", "content": CALLED},
]
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["zz", "there"], "min_p": 0.0,
    "presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.0, "top_k": 5,
    "min_tokens": 1, "ignore_eos": False, "user": "u", "logit_bias": {"5": 1.5}, "n": 2,
    "priority": 1, "timeout_s": 20, "max_tokens": 9,
}  # fmt: skip
STREAM = {"stream": True, "stream_options": {"include_usage": True, "queue_position": True}}

CHAT: list[dict[str, Any]] = [
    {"model": "echo", "messages": HELLO},
    {"model": "echo", "messages": HELLO, "stream": True, "max_tokens": 30},
    {"model": "echo", "messages": HELLO, **STREAM, "max_completion_tokens": 5},
    {"model": "think", "messages": TALK, "tools": [TOOL], "tool_choice": "auto"},
    {"model": "think", "messages": TALK, "tools": [TOOL], "parallel_tool_calls": False, **STREAM},
    {"model": "think", "messages": HELLO, "logprobs": True, "top_logprobs": 2, **STREAM},
    {"model": "think", "messages": HELLO, "reasoning_effort": "low", "separate_reasoning": True},
    {"model": "echo", "messages": HELLO, **SAMPLING},
    {"model": "echo", "messages": HELLO, "stream": True, "n": 3, "logprobs": True, "seed": 1},
    {"model": "echo", "messages": HELLO, "response_format": {"type": "text"}},
    {"model": "echo", "messages": HELLO, "response_format":
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
    {"model": "think", "messages": HELLO, "tools": [TOOL], "tool_choice":
        {"type": "function", "function": {"name": "f"}}},
    {"model": "think", "messages": [*HELLO, {"role": "assistant", "content": "I"}],
        "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}},
]  # fmt: skip

COMPLETION: list[dict[str, Any]] = [
    {"model": "echo", "prompt": "hello"},
    {"model": "echo", "prompt": "hello", "stream": True, "max_tokens": 40},
    {"model": "echo", "prompt": ["one", "two"], "n": 2, "max_tokens": 3},
    {"model": "echo", "prompt": [104, 105], "logprobs": 2, "echo": False, **STREAM},
    {"model": "think", "prompt": [[104, 105], [97]], "max_tokens": 3},
    {"model": "echo", "prompt": "hi", "echo": True, **SAMPLING},
    {"model": "echo", "prompt": "hi", "response_format": {"type": "json_object"}, "suffix": ""},
]

RESPONSES: list[dict[str, Any]] = [
    {"model": "echo", "input": "hello"},
    {"model": "think", "input": [{"role": "user", "content": CALLED}], "stream": True},
    {"model": "think", "stream": True, "instructions": "be brief", "max_output_tokens": 90,
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}],
        "tool_choice": "auto", "parallel_tool_calls": True, "temperature": 0.2, "top_p": 0.9,
        "input": [
            {"type": "message", "role": "user", "content":
                [{"type": "input_text", "text": CALLED}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"role": "user", "content": CALLED}]},
    {"model": "echo", "input": "hello", "text": {"format": {"type": "json_schema", "name": "s",
        "schema": SCHEMA}}, "reasoning": {"effort": "low"}, "metadata": {"a": "b"}},
    {"model": "echo", "input": "hello", "include": ["message.output_text.logprobs"],
        "top_logprobs": 2, "store": False, "truncation": "auto", "stream": True},
]  # fmt: skip

BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "call f"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "2", "is_error": False},
        {"type": "text", "text": CALLED}]},
]  # fmt: skip
CLAUDE_TOOL = {"name": "f", "description": "does f", "input_schema": SCHEMA}

MESSAGES: list[dict[str, Any]] = [
    {"model": "echo", "max_tokens": 5, "messages": HELLO},
    {"model": "echo", "max_tokens": 9, "messages": HELLO, "stream": True, "system": "be brief"},
    {"model": "think", "max_tokens": 99, "messages": BLOCKS, "tools": [CLAUDE_TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stream": True},
    {"model": "think", "max_tokens": 99, "messages": BLOCKS, "tools": [CLAUDE_TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 20}},
    {"model": "echo", "max_tokens": 9, "messages": HELLO, "temperature": 0.5, "top_p": 0.9,
        "top_k": 4, "stop_sequences": ["zz"], "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
]  # fmt: skip
COUNT = [{k: v for k, v in body.items() if k != "max_tokens"} for body in MESSAGES]

OLLAMA_CHAT: list[dict[str, Any]] = [
    {"model": "echo", "messages": HELLO},
    {"model": "echo:latest", "messages": HELLO, "stream": False, "keep_alive": "5m"},
    {"model": "think", "messages": [*HELLO, {"role": "user", "content": CALLED}], "tools": [TOOL],
        "think": True},
    {"model": "echo", "messages": HELLO, "logprobs": True, "top_logprobs": 1, "options":
        {"num_predict": 5, "temperature": 0.5, "top_k": 3.0, "top_p": 0.5, "seed": 1,
         "stop": ["zz"], "repeat_penalty": 1.0, "num_ctx": 512, "repeat_last_n": 64}},
    {"model": "echo", "messages": HELLO, "format": SCHEMA},
    {"model": "echo", "messages": [{"role": "assistant", "content": "", "tool_calls":
        [{"function": {"name": "f", "arguments": {"a": 1}}}]}, *HELLO]},
    {"model": "echo", "messages": []},
]  # fmt: skip
OLLAMA_GENERATE: list[dict[str, Any]] = [
    {"model": "echo", "prompt": "hello", "options": {"num_predict": 20}},
    {"model": "think", "prompt": "hello", "system": "be brief", "stream": False, "raw": False},
    {"model": "echo", "prompt": "hello", "raw": True, "context": [], "suffix": "", "images": []},
    {"model": "echo"},
]

#: By path: what table row it belongs to is the path itself.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/embeddings": [
        {"model": "echo", "input": "hello"},
        {"model": "echo", "input": ["a", "b"] * 20, "encoding_format": "base64", "dimensions": 4},
        {"model": "echo", "input": [[1, 2], [3]], "user": "u", "timeout_s": 9},
        {"model": "echo", "input": [1, 2, 3]},
    ],
    "/tokenize": [
        {"model": "echo", "prompt": "hello"},
        {"model": "echo", "messages": HELLO, "tools": [TOOL], "chat_template_kwargs": {"a": 1}},
    ],
    "/detokenize": [{"model": "echo", "tokens": [104, 105, 106]}],
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
    "/api/embed": [{"model": "echo", "input": ["a", "b"], "truncate": True, "dimensions": 3}],
    "/api/embeddings": [{"model": "echo", "prompt": "a"}],
    "/api/show": [{"model": "echo"}, {"name": "think:latest"}],
    "/api/pull": [{"model": "echo", "stream": False}],
    "/inference": [
        {"prompt": "hello", "history": [["q", "a"]], "backend": "local"},
        {"prompt": "hello", "history": [], "remote": False},
    ],
    "/stream": [{"prompt": CALLED, "history": [["q", "a"]], "backend": "think"}],
}
GETS = (
    "/livez", "/readyz", "/version", "/v1/models", "/v1/models/echo", "/v1/models/no%20such",
    "/api/tags", "/api/ps", "/api/version", "/openapi.json", "/",
)  # fmt: skip
ODD = (
    "/nowhere", "/v1/", "/v1/models/", "/v1/models/%00", "/v1/models/%ff%fe", "//", "/..",
    "/%2e%2e/",
    "/v1/chat/completions/", "/V1/CHAT/COMPLETIONS", "/v1/models/" + "a" * 3000, "/api/nothing",
    "/v1/messages/batches", "/v1%2Fmodels", "/v1/models?limit=" + "9" * 400, "/ui/", "/docs",
    "/api/delete", "/api/blobs/sha256:00", "/metrics", "/v1/chat/completions?stream=true", "*",
    "http://elsewhere.invalid/v1/models", "/inference/", "/stream/x", "/static-offline-docs/../x",
    "/v1/models/echo%0d%0ax:%20y", "/?%s%n", "/v1/models/\xff".encode("latin-1").decode("latin-1"),
)  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
