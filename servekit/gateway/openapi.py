"""The OpenAPI document: FastAPI's own, and with it the endpoints that do not run through it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from fastapi import FastAPI

from servekit.gateway.operations import OPERATIONS, Envelope, Operation

_REF = "#/components/schemas/{name}"
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_TEXT = {"type": "string"}
_MAY_BE_TEXT = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


#: By `Operation.envelope`.
_ENVELOPES = {
    "OpenAI": _object(
        error=_object(message=_TEXT, type=_TEXT, param=_MAY_BE_TEXT, code=_MAY_BE_TEXT)
    ),
    "Anthropic": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "Ollama": _object(error=_TEXT),
    "HuixiangDou": _object(text=_TEXT, error=_TEXT),
}
_ERRORS = {
    "400": "The request is wrong; the message says how",
    "401": "An API key is needed, or this one is not known; only where the file has keys",
    "403": "The key does not allow it",
    "404": "No such model",
    "405": "The path takes another method",
    "413": "The body is over the limit",
    "429": "Too many requests wait, or the key's limits are reached; see Retry-After",
    "500": "The engine failed, or the request is quarantined: workers died of it",
    "503": "The model cannot serve now",
    "504": "Not done within the timeout",
}


def describe_hot_routes(app: FastAPI, served: Collection[str]) -> None:
    """Have `app.openapi()` describe the paths in `served` that do not run through FastAPI."""
    original = app.openapi
    operations = [operation for operation in OPERATIONS if operation.path in served]

    def openapi() -> dict[str, Any]:
        document = original()
        if "securitySchemes" not in document.get("components", {}):
            _extend(document, operations)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _extend(document: dict[str, Any], operations: list[Operation]) -> None:
    kinds = list(dict.fromkeys(operation.takes for operation in operations))
    references, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    bodies = dict(zip(kinds, references, strict=True))
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    errors = {f"{name}Error": schema for name, schema in _ENVELOPES.items()}
    schemas |= components | errors
    document["components"]["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]  # none, where there are no keys
    for operation in operations:
        described = _describe(operation, bodies[operation.takes])
        document["paths"].setdefault(operation.path, {})["post"] = described
    _describe_reads(document)


def _describe_reads(document: dict[str, Any]) -> None:
    """Have what FastAPI tells of its own routes be what happens: our errors, in our envelopes."""
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for path, methods in document["paths"].items():
        read = methods.get("get", {})
        if "responses" not in read or "service" in read.get("tags", ()):
            continue
        read["responses"].pop("422", None)
        codes = ("401", "403", "404") if "{" in path else ("401",)
        failures = _refusals("Ollama" if path.startswith("/api/") else "OpenAI")
        read["responses"] = {code: failures[code] for code in codes} | read["responses"]


def _describe(operation: Operation, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": "post" + operation.path.replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": body, "example": operation.asked}},
        },
        "responses": {"200": _answer(operation), **_failures(operation)},
    }


def _failures(operation: Operation) -> dict[str, Any]:
    found = _refusals(operation.envelope)
    if operation.tag == "adapters":
        found["409"] = found["400"] | {"description": "A worker died over it; nothing was changed"}
    return found


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.text:
        said: dict[str, Any] = {"text/plain": {"schema": _TEXT, "example": operation.text}}
        return {"description": "It is done", "content": said}
    content: dict[str, Any] = {
        "application/json": {"schema": _shape(operation.answer), "example": operation.answer}
    }
    if operation.streams:
        content[operation.streams] = {}  # a schema would be one of each event
    streamed = ", or its pieces where it is streamed" if operation.streams else ""
    return {"description": f"The answer{streamed}", "content": content}


def _shape(example: dict[str, Any]) -> dict[str, Any]:
    """What all answers have in common with the example: an object with its fields."""
    return {"type": "object", "properties": {name: {} for name in example}}


def _refusals(envelope: Envelope) -> dict[str, Any]:
    """The errors of an endpoint, by status."""
    reference = {"$ref": _REF.format(name=f"{envelope}Error")}
    content = {"application/json": {"schema": reference}}
    return {code: {"description": text, "content": content} for code, text in _ERRORS.items()}
