"""The OpenAPI document: FastAPI's own, plus the endpoints that bypass FastAPI.

The schemas come from the types that decode requests and encode responses; the document is made on
its first request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fastapi import FastAPI

from servekit.gateway.api import huixiangdou
from servekit.gateway.api.admin import lora
from servekit.gateway.api.anthropic import endpoints as anthropic
from servekit.gateway.api.audio import endpoints as audio
from servekit.gateway.api.health_types import Health, Live, Version
from servekit.gateway.api.ollama import endpoints as ollama
from servekit.gateway.api.ollama.response_types import (
    OllamaError,
    OllamaModels,
    OllamaRunning,
    OllamaVersion,
)
from servekit.gateway.api.openai import embeddings, endpoints, responses
from servekit.gateway.api.openai.batches import BatchList, BatchObject
from servekit.gateway.api.openai.files import FileList, FileObject, RemovedFile
from servekit.gateway.api.openai.response_types import Model, ModelList, OpenAIError
from servekit.gateway.api.openai.responses_events import InputItems, RemovedResponse, Response
from servekit.gateway.api.openapi.operation import EVENTS, Operation
from servekit.gateway.api.openapi.schemas import Json, make_example, make_schemas
from servekit.gateway.api.scoring import endpoints as scoring

OPERATIONS: tuple[Operation, ...] = (
    *endpoints.OPERATIONS,
    *responses.OPERATIONS,
    *embeddings.OPERATIONS,
    *scoring.OPERATIONS,
    *audio.OPERATIONS,
    *lora.OPERATIONS,
    *anthropic.OPERATIONS,
    *ollama.OPERATIONS,
    *huixiangdou.OPERATIONS,
)
#: The types of the answers to GET, by path.
READS: dict[str, type] = {
    "/livez": Live,
    "/readyz": Health,
    "/version": Version,
    "/v1/models": ModelList,
    "/v1/models/{model}": Model,
    "/v1/responses/{id}": Response,
    "/v1/responses/{id}/input_items": InputItems,
    "/v1/files": FileList,
    "/v1/files/{id}": FileObject,
    "/v1/batches": BatchList,
    "/v1/batches/{id}": BatchObject,
    "/api/tags": OllamaModels,
    "/api/ps": OllamaRunning,
    "/api/version": OllamaVersion,
}
#: The types of the answers to DELETE, by path.
REMOVALS: dict[str, type] = {
    "/v1/responses/{id}": RemovedResponse,
    "/v1/files/{id}": RemovedFile,
}
#: The types of the answers to POST that FastAPI serves, by path.
WRITES: dict[str, type] = {
    "/v1/responses/{id}/cancel": Response,
    "/v1/files": FileObject,
    "/v1/batches": BatchObject,
    "/v1/batches/{id}/cancel": BatchObject,
}
_METHODS: dict[str, Mapping[str, type]] = {"get": READS, "delete": REMOVALS, "post": WRITES}
_STORED = ("/v1/responses", "/v1/files", "/v1/batches")
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_ERRORS = {
    "400": "The request is wrong; the message says why",
    "401": "An API key is needed, or this one is unknown; only if the file has keys",
    "403": "The key does not allow it",
    "404": "There is no such model, response, file or batch",
    "405": "The path takes another method",
    "413": "The body is over the limit",
    "429": "Too many requests wait, or the key's limits are reached; see Retry-After",
    "500": "The engine failed, or the request is quarantined: workers died of it",
    "502": "The endpoint behind a remote model failed, or its answer is wrong",
    "503": "The model cannot serve now",
    "504": "The request was not done within the timeout",
}


def describe_hot_routes(app: FastAPI, served: Collection[str]) -> None:
    """Add the paths in `served` that bypass FastAPI to the document of `app.openapi()`."""
    original = app.openapi

    def openapi() -> Json:
        document = original()
        if "securitySchemes" not in document.get("components", {}):
            _extend_document(document, served)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def describe_forwarded_routes(app: FastAPI, known: Callable[[], Mapping[str, str]]) -> None:
    """Add the forwarded endpoints to the document of `app.openapi()`: those of the models now.

    `known` returns them, each with its summary.
    """
    original = app.openapi

    def openapi() -> Json:
        document = original()
        paths = {path: {"post": _describe_forwarded(path, text)} for path, text in known().items()}
        return {**document, "paths": {**document["paths"], **paths}}

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_forwarded(path: str, summary: str) -> Json:
    fields: Json = {"type": "object", "properties": {"model": {"type": "string"}}}
    any_body: Json = {"type": "string", "format": "binary"}
    return {
        "tags": ["forwarded"],
        "summary": f"{summary}, by the model's own server",
        "operationId": "post" + path.replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": {
                kind: {"schema": fields} for kind in ("application/json", "multipart/form-data")
            },
        },
        "responses": {
            "200": {"description": "The server's answer", "content": {"*/*": {"schema": any_body}}}
        }
        | {code: {"description": text} for code, text in _ERRORS.items()},
    }


def _extend_document(document: Json, served: Collection[str]) -> None:
    operations = [operation for operation in OPERATIONS if operation.path in served]
    contents = Contents(operations)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= contents.components
    components["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]  # {}: no key
    for path, methods in document["paths"].items():
        for name in _METHODS.keys() & methods.keys():
            if name != "post" or path in WRITES:
                _describe_read(methods[name], contents, _METHODS[name], path)
    for operation in operations:
        described = _describe_operation(operation, contents)
        document["paths"].setdefault(operation.path, {})["post"] = described


class Contents:
    """The schemas of bodies, each with an example."""

    def __init__(self, operations: Collection[Operation]) -> None:
        kinds = [
            kind
            for one in operations
            for kind in (one.request, one.response, *one.pieces, one.error)
        ]
        self.schemas, self.components = make_schemas(
            [*kinds, *(one for made in _METHODS.values() for one in made.values()), OpenAIError]
        )

    def describe(self, kind: Any, content_type: str = "application/json") -> Json:
        """Return the `content` of a body."""
        schema = self.schemas[kind]
        return {content_type: {"schema": schema, "example": make_example(schema, self.components)}}

    def refusals(self, error: Any) -> Json:
        """Return the errors of an endpoint, by status."""
        content = {"application/json": {"schema": self.schemas[error]}}
        return {code: {"description": text, "content": content} for code, text in _ERRORS.items()}


def _describe_read(read: Json, contents: Contents, kinds: Mapping[str, type], path: str) -> None:
    """Describe the answers of FastAPI's endpoint, with servekit's errors instead of its own."""
    answers: Json = read["responses"]
    if path in kinds:
        for code in {"200", "503"} & answers.keys():
            answers[code]["content"] = contents.describe(kinds[path])
    if "service" not in read.get("tags", ()):
        answers.pop("422", None)
        failures = contents.refusals(OllamaError if path.startswith("/api/") else OpenAIError)
        codes = _ERRORS if kinds is WRITES else _refusals_of_read(path, read)
        read["responses"] = {code: failures[code] for code in codes} | answers


def _refusals_of_read(path: str, read: Json) -> Collection[str]:
    """Return the statuses of the errors that an endpoint without a body may answer with."""
    found = {"401"}
    if any(one["in"] == "query" for one in read.get("parameters", ())):
        found.add("400")
    if "{" in path:
        found |= {"403", "404"}
    if path.startswith(_STORED):  # which may be off, or out of reach
        found |= {"404", "503"}
    return sorted(found)


def _describe_operation(operation: Operation, contents: Contents) -> Json:
    failures = contents.refusals(operation.error)
    if operation.tag == "adapters":
        died = {"description": "A worker died of it; nothing was changed"}
        failures["409"] = failures["400"] | died
    return {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": "post" + operation.path.replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": contents.describe(operation.request, operation.body),
        },
        "responses": {"200": _describe_answer(operation, contents), **failures},
    }


def _describe_answer(operation: Operation, contents: Contents) -> Json:
    content_type = "text/plain" if operation.plain else "application/json"
    content = contents.describe(operation.response, content_type)
    if operation.texts:
        content["text/plain"] = {"schema": {"type": "string"}}
    if not operation.pieces:
        return {"description": "The answer", "content": content}
    content[operation.stream] = {"schema": _describe_piece(operation, contents)}
    return {"description": "The answer, or its pieces if it is streamed", "content": content}


def _describe_piece(operation: Operation, contents: Contents) -> Json:
    """Return the schema of one line, or of one event in the form that OpenAPI 3.2 gives events.

    OpenAPI 3.1 cannot describe a whole stream.
    """
    schemas = [contents.schemas[kind] for kind in operation.pieces]
    either = {"anyOf": schemas} if len(schemas) > 1 else schemas[0]
    if operation.stream != EVENTS:
        return {"description": "Each line", **either}
    data: Json = {"type": "string"}
    if operation.pieces != (str,):
        data |= {"contentMediaType": "application/json", "contentSchema": either}
    if OpenAIError in operation.pieces:  # these streams end with an event unlike the others
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {
        "description": "Each event",
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }
