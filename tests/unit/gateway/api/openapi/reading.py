"""Answers against the schemas of the OpenAPI document, and nothing in them that it keeps quiet."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema

from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.openapi.schemas import make_example, make_schemas
from servekit.gateway.app import Application
from servekit.gateway.routing.router import Router


class Reading:
    """The document, as a strict reader has it: a field that no schema names is an error."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = json.loads(json.dumps(document))
        for schema in self._document["components"]["schemas"].values():
            if "properties" in schema:
                schema["additionalProperties"] = False

    def check(
        self, path: str, answer: Any, kind: str = "application/json", method: str = ""
    ) -> None:
        """Raise ValidationError unless it is an answer, or with `kind` a piece, of the path."""
        methods = self._document["paths"][path]
        method = method or ("post" if "post" in methods else "get")
        described = methods[method]["responses"]["200"]["content"][kind]
        schema = described["schema"]
        if kind == "text/event-stream":  # what the data of an event is; readers decode it
            data = schema["properties"]["data"]
            schema = data.get("anyOf", [data])[0].get("contentSchema", {"type": "string"})
        self.fits(schema, answer)

    def fits(self, schema: dict[str, Any], answer: Any) -> None:
        """Raise ValidationError unless the answer fits a schema of the document."""
        whole = schema | {"components": self._document["components"]}
        jsonschema.validate(answer, whole, cls=jsonschema.Draft202012Validator)


@functools.cache
def make_document(*, legacy: bool = True) -> dict[str, Any]:
    """Return a gateway's document, made once for all tests: it takes a fifth of a second."""
    return Application(Router("test"), 10**6, ui=False, legacy=legacy).rest.openapi()


@functools.cache
def make_reading() -> Reading:
    return Reading(make_document())


def data_of(stream: str) -> list[Any]:
    """What the events or lines of a stream hold; their end mark apart."""
    lines = stream.splitlines()
    if any(line.startswith("data: ") for line in lines):
        lines = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def example_of(operation: Operation) -> Any:
    """The document's example of a request."""
    schemas, components = make_schemas([operation.request])
    return make_example(schemas[operation.request], components)
