"""The hot routes in the OpenAPI document, from the very types that decode them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from servekit.gateway.schema import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{name}"
_EXAMPLES: dict[type, dict[str, Any]] = {
    ChatRequest: {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
    },
    CompletionRequest: {
        "model": "smollm2-135m-instruct",
        "prompt": "The capital of France is",
        "max_tokens": 16,
    },
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    "400": "The request is wrong; the message says how",
    "401": "An API key is needed, or this one is not known; only where the file has keys",
    "403": "The key does not allow it",
    "404": "No such model",
    "413": "The body is over the limit",
    "429": "Too many requests wait, or the key's limits are reached; see Retry-After",
    "500": "The engine failed, or the request is quarantined: workers died of it",
    "503": "The model cannot serve now",
    "504": "Not done within the timeout",
}


def describe_hot_routes(app: FastAPI) -> None:
    """Have `app.openapi()` describe the routes that do not run through FastAPI."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        document = original()
        if "/v1/chat/completions" not in document["paths"]:
            _extend(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _extend(document: dict[str, Any]) -> None:
    _, components = msgspec.json.schema_components(
        (ChatRequest, CompletionRequest), ref_template=_REF
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= components | {"Error": _ERROR}
    document["components"]["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]  # none, where there are no keys
    document["paths"] |= {
        "/v1/chat/completions": {"post": _operation(ChatRequest, "A chat completion")},
        "/v1/completions": {"post": _operation(CompletionRequest, "A completion")},
    }


def _operation(kind: type, summary: str) -> dict[str, Any]:
    reference = {"$ref": _REF.format(name=kind.__name__)}
    body = {"application/json": {"schema": reference, "example": _EXAMPLES[kind]}}
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    answer = {
        "description": "The answer, or server-sent events where `stream` is true",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
    failures = {code: {"description": text, "content": error} for code, text in _ERRORS.items()}
    return {
        "tags": ["OpenAI"],
        "summary": summary,
        "operationId": kind.__name__,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": answer, **failures},
    }
