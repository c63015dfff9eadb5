"""The OpenAPI document: FastAPI's own, plus the endpoints that bypass FastAPI.

The document is made on its first request, and the modules it needs are imported then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI

if TYPE_CHECKING:
    from servekit.gateway.api.openapi.operations import Envelope, Operation

_REF = "#/components/schemas/{name}"
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
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
    "502": "The endpoint behind a remote model failed, or its answer is wrong",
    "503": "The model cannot serve now",
    "504": "Not done within the timeout",
}
Json = dict[str, Any]
#: JSON schemas by type: a reference, or the schema itself for a type without a name.
Schemas = Mapping[type, Json]


def describe_hot_routes(app: FastAPI, served: Collection[str]) -> None:
    """Add the paths in `served` that bypass FastAPI to the document of `app.openapi()`."""
    original = app.openapi

    def openapi() -> Json:
        document = original()
        if "securitySchemes" not in document.get("components", {}):
            _extend(document, served)
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _extend(document: Json, served: Collection[str]) -> None:
    from servekit.gateway.api.openapi.operations import OPERATIONS

    operations = [operation for operation in OPERATIONS if operation.path in served]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    known = _add_schemas(schemas, operations)
    document["components"]["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]  # {}: no key
    for operation in operations:
        described = _describe(operation, known)
        document["paths"].setdefault(operation.path, {})["post"] = described
    _describe_reads(document, known)


def _add_schemas(schemas: Json, operations: list[Operation]) -> Schemas:
    from servekit.gateway.api.openapi import examples
    from servekit.gateway.api.openapi.operations import ENVELOPES, READS
    from servekit.gateway.api.openapi.request_field_docs import ASKED
    from servekit.gateway.api.openapi.response_field_docs import TOLD

    asked = [operation.takes for operation in operations]
    told = [kind for operation in operations for kind in (operation.gives, *operation.pieces)]
    told += [*READS.values(), *ENVELOPES.values()]
    known: dict[type, Json] = {}
    for kinds, sentences in ((asked, ASKED), (told, TOLD)):
        unique = list(dict.fromkeys(kinds))
        references, components = msgspec.json.schema_components(unique, ref_template=_REF)
        known |= zip(unique, references, strict=True)
        for component in components.values():
            _describe_fields(component, sentences)
            if sentences is ASKED:
                _narrow_fields(component)
        schemas |= components
    for envelope, example in examples.ERRORS.items():
        schemas[f"{envelope}Error"]["examples"] = [example]
    return known


def _describe_fields(component: Json, sentences: Mapping[str, str]) -> None:
    """Set the description of each field, by `Type.field` if that is known, else by its name."""
    for name, field in component.get("properties", {}).items():
        sentence = sentences.get(f"{component['title']}.{name}") or sentences.get(name)
        if sentence:
            field["description"] = sentence


def _narrow_fields(component: Json) -> None:
    """Restrict fields that are declared but refused to their harmless values."""
    from servekit.gateway.api.openai.schema import NOTHING
    from servekit.gateway.api.openapi.request_field_docs import TAKEN

    for name, field in component.get("properties", {}).items():
        taken = TAKEN.get(f"{component['title']}.{name}") or TAKEN.get(name)
        if taken is None and name in NOTHING and not field.keys() & {"type", "anyOf", "$ref"}:
            taken = NOTHING[name]
        if taken is not None:
            field["enum"] = list(taken)


def _describe_reads(document: Json, known: Schemas) -> None:
    """Replace the errors that FastAPI documents for its own routes by servekit's."""
    from servekit.gateway.api.openapi import examples
    from servekit.gateway.api.openapi.operations import READS

    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    for path, methods in document["paths"].items():
        read = methods.get("get", {})
        if path in READS:
            content = {"schema": known[READS[path]], "example": examples.READS[path]}
            for code in {"200", "503"} & set(read["responses"]):
                read["responses"][code]["content"] = {"application/json": content}
        if "responses" not in read or "service" in read.get("tags", ()):
            continue
        read["responses"].pop("422", None)
        codes = ("401", "403", "404") if "{" in path else ("401",)
        failures = _refusals("Ollama" if path.startswith("/api/") else "OpenAI")
        read["responses"] = {code: failures[code] for code in codes} | read["responses"]


def _describe(operation: Operation, known: Schemas) -> Json:
    body = {"schema": known[operation.takes], "example": operation.asked}
    return {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": "post" + operation.path.replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": _answer(operation, known), **_failures(operation)},
    }


def _failures(operation: Operation) -> Json:
    found = _refusals(operation.envelope)
    if operation.tag == "adapters":
        found["409"] = found["400"] | {"description": "A worker died over it; nothing was changed"}
    return found


def _answer(operation: Operation, known: Schemas) -> Json:
    kind = "text/plain" if operation.gives is str else "application/json"
    content: Json = {kind: {"schema": known[operation.gives], "example": operation.answer}}
    if operation.streams:
        content[operation.streams] = {"schema": _piece(operation, known)}
    streamed = ", or its pieces where it is streamed" if operation.streams else ""
    return {"description": f"The answer{streamed}", "content": content}


def _piece(operation: Operation, known: Schemas) -> Json:
    """Return the schema of one line, or of one event in the form that OpenAPI 3.2 gives events.

    OpenAPI 3.1 cannot describe a whole stream.
    """
    schemas = [known[kind] for kind in operation.pieces]
    either = {"anyOf": schemas} if len(schemas) > 1 else schemas[0]
    if operation.streams != "text/event-stream":
        return {"description": "Each line", **either}
    data: Json = {"type": "string"}
    if operation.pieces != (str,):
        data |= {"contentMediaType": "application/json", "contentSchema": either}
    if operation.marks_its_end:
        data = {"anyOf": [data, {"const": "[DONE]"}]}
    return {
        "description": "Each event",
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": data},
    }


def _refusals(envelope: Envelope) -> Json:
    """Return the errors of an endpoint, by status."""
    reference = {"$ref": _REF.format(name=f"{envelope}Error")}
    content = {"application/json": {"schema": reference}}
    return {code: {"description": text, "content": content} for code, text in _ERRORS.items()}
