"""The OpenAPI document against the endpoints themselves."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi.document import OPERATIONS, READS, WRITES
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.openapi.schemas import make_example, make_schemas
from servekit.gateway.app import Application
from servekit.gateway.routing.router import Router
from tests.unit.gateway.api.openapi.reading import example_of, make_document, make_reading
from tests.unit.gateway.conftest import Service


async def test_every_endpoint_is_described_and_nothing_else() -> None:
    application = Application(Router("test"), 10**6, ui=False, legacy=True)
    described = {
        path for path, methods in application.rest.openapi()["paths"].items() if "post" in methods
    }
    refused = {"/api/push", "/api/create", "/api/copy"}  # said to be missing, in words
    admin = {path for path in described if path.startswith("/admin/")}
    assert {"/admin/reload", "/admin/load/{name}", "/admin/sleep/{name}"} <= admin
    assert described - admin - set(WRITES) == set(application.hot) - refused
    assert set(WRITES) <= described
    assert "/inference" not in make_document(legacy=False)["paths"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_the_example_is_a_body_that_is_taken(operation: Operation) -> None:
    body = msgspec.json.encode(example_of(operation))
    assert isinstance(decode(operation.request, body), operation.request)


async def test_limits_are_stated() -> None:
    described = make_document()
    schemas = described["components"]["schemas"]
    chat = next(schema for name, schema in schemas.items() if name.endswith("schema.ChatRequest"))
    text = json.dumps(chat["properties"])
    assert '"minimum": -2' in text
    assert '"maxItems": 4096' in text
    assert json.dumps(described).count('"$ref": "#/components/schemas/') > 20


async def test_every_reference_leads_somewhere() -> None:
    described = make_document()
    known = described["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    wanted = {name.removeprefix("#/components/schemas/") for name in references(described)}
    assert wanted <= set(known)


async def test_every_object_and_every_field_is_described() -> None:
    described = make_document()
    bare = [
        f"{kind}.{name}"
        for kind, schema in described["components"]["schemas"].items()
        for name, part in {"": schema, **schema.get("properties", {})}.items()
        # a constant, or a choice of a few, may speak for itself
        if not (part.get("description") or "enum" in part or part.get("type") == "null")
    ]
    assert not bare


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
async def test_the_example_of_an_answer_fits(operation: Operation) -> None:
    described = make_document()
    responses = described["paths"][operation.path]["post"]["responses"]
    kind = "text/plain" if operation.plain else "application/json"
    make_reading().check(operation.path, responses["200"]["content"][kind]["example"], kind)


async def test_the_examples_of_what_is_read_and_of_errors_fit() -> None:
    described = make_document()
    reader = make_reading()
    for path in READS:
        content = described["paths"][path]["get"]["responses"]["200"]["content"]
        reader.check(path, content["application/json"]["example"], method="get")
    errors = {operation.error for operation in OPERATIONS}
    schemas, components = make_schemas(errors)
    for error in errors:
        reader.fits(schemas[error], make_example(schemas[error], components))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
async def test_errors_look_as_described(service: Service, operation: Operation) -> None:
    import jsonschema

    await service.up()
    application = Application(service.router, 10**6, ui=False, legacy=True)
    described = make_document()
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as client:
        answer = await client.post(operation.path, content=b"{")
    responses = described["paths"][operation.path]["post"]["responses"]
    assert str(answer.status_code) in responses
    schema = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), schema | {"components": described["components"]})


@pytest.mark.parametrize(
    "takes",
    dict.fromkeys(operation.request for operation in OPERATIONS),
    ids=lambda one: one.__name__,
)
def test_a_model_may_be_left_out_or_empty_but_not_null_as_is_said(takes: type) -> None:
    """Schemathesis counts a body that its document allows, and that is always refused, as a lie."""
    [_], components = msgspec.json.schema_components([takes])
    schema = components[takes.__name__]
    field = schema["properties"].get("model")
    if field is None:
        return
    assert (field["type"], field["default"]) == ("string", "")
    assert "model" not in schema.get("required", ())
    with pytest.raises(msgspec.ValidationError, match=r"`str`, got `null` - at `\$.model`"):
        msgspec.json.decode(b'{"model": null}', type=takes)


@pytest.mark.parametrize(
    ("path", "method", "statuses"),
    [
        ("/v1/models", "get", {"200", "400", "401"}),
        ("/v1/files", "get", {"200", "400", "401", "404", "503"}),
        ("/v1/responses/{id}", "get", {"200", "400", "401", "403", "404", "503"}),
        ("/v1/responses/{id}", "delete", {"200", "401", "403", "404", "503"}),
    ],
)
def test_the_errors_of_an_endpoint_that_reads_are_described(
    path: str, method: str, statuses: set[str]
) -> None:
    assert set(make_document()["paths"][path][method]["responses"]) == statuses


def test_the_errors_of_uploads_and_batches_are_described() -> None:
    for path in WRITES:
        described = make_document()["paths"][path]["post"]["responses"]
        assert {"400", "401", "404", "413", "429", "503"} <= set(described)
