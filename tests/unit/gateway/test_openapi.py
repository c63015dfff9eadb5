"""The OpenAPI document against the endpoints themselves."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from servekit.gateway.app import Application
from servekit.gateway.operations import OPERATIONS, Operation
from servekit.gateway.router import Router
from servekit.gateway.schema import decode
from tests.unit.gateway.conftest import Service


def document(router: Router, *, legacy: bool = True) -> dict[str, Any]:
    return Application(router, 10**6, ui=False, legacy=legacy).rest.openapi()


async def test_every_endpoint_is_described_and_nothing_else() -> None:
    router = Router("test")
    application = Application(router, 10**6, ui=False, legacy=True)
    described = {
        path for path, methods in application.rest.openapi()["paths"].items() if "post" in methods
    }
    refused = {"/api/push", "/api/create", "/api/copy"}  # said to be missing, in words
    assert described - {"/admin/reload"} == set(application.hot) - refused
    assert "/inference" not in document(router, legacy=False)["paths"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_the_example_is_a_body_that_is_taken(operation: Operation) -> None:
    assert isinstance(
        decode(operation.takes, msgspec.json.encode(operation.asked)), operation.takes
    )


async def test_limits_are_stated() -> None:
    described = document(Router("test"))
    schemas = described["components"]["schemas"]
    chat = next(schema for name, schema in schemas.items() if name.endswith("schema.ChatRequest"))
    text = json.dumps(chat["properties"])
    assert '"minimum": -2' in text
    assert '"maxItems": 4096' in text
    assert json.dumps(described).count('"$ref": "#/components/schemas/') > 20


async def test_every_reference_leads_somewhere() -> None:
    described = document(Router("test"))
    known = described["components"]["schemas"]

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    wanted = {name.removeprefix("#/components/schemas/") for name in references(described)}
    assert wanted <= set(known)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
async def test_errors_look_as_described(service: Service, operation: Operation) -> None:
    import jsonschema

    await service.up()
    application = Application(service.router, 10**6, ui=False, legacy=True)
    described = application.rest.openapi()
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url="http://servekit") as client:
        answer = await client.post(operation.path, content=b"{")
    responses = described["paths"][operation.path]["post"]["responses"]
    assert str(answer.status_code) in responses
    schema = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), schema | {"components": described["components"]})
