"""The OpenAPI document against the endpoints themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import httpx
import msgspec
import pytest

from servekit.gateway.api.openai.schema import decode
from servekit.gateway.api.openapi import examples
from servekit.gateway.api.openapi.operations import ENVELOPES, OPERATIONS, READS, Operation
from servekit.gateway.api.openapi.request_field_docs import ASKED
from servekit.gateway.api.openapi.response_field_docs import TOLD
from servekit.gateway.app import Application
from servekit.gateway.routing.router import Router
from tests.unit.gateway.api.openapi.reading import Reading
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
    admin = {path for path in described if path.startswith("/admin/")}
    assert {"/admin/reload", "/admin/load/{name}", "/admin/sleep/{name}"} <= admin
    assert described - admin == set(application.hot) - refused
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


async def test_every_object_and_every_field_is_described() -> None:
    described = document(Router("test"))
    bare = [
        f"{kind}.{name}"
        for kind, schema in described["components"]["schemas"].items()
        for name, part in {"": schema, **schema.get("properties", {})}.items()
        if not part.get("description")
    ]
    assert not bare


async def test_every_description_is_of_some_field() -> None:
    described = document(Router("test"))
    schemas = described["components"]["schemas"].values()
    named = {name for schema in schemas for name in schema.get("properties", {})}
    named |= {f"{schema['title']}.{name}" for schema in schemas for name in schema["properties"]}
    assert set(ASKED) | set(TOLD) <= named


async def test_types_of_questions_and_of_answers_have_names_of_their_own() -> None:
    """They are described apart, and share one namespace."""
    schemas = document(Router("test"))["components"]["schemas"]
    asked = msgspec.json.schema_components([operation.takes for operation in OPERATIONS])[1]
    told = msgspec.json.schema_components([operation.gives for operation in OPERATIONS])[1]
    assert not set(asked) & set(told)
    assert set(asked) | set(told) <= set(schemas)


def test_the_document_costs_nothing_until_it_is_asked_for() -> None:
    program = (
        "import sys, servekit.gateway.app\n"
        "print([name for name in sys.modules if 'gateway.reference' in name])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.strip() == b"[]"


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
async def test_the_example_of_an_answer_fits(operation: Operation) -> None:
    kind = "text/plain" if operation.gives is str else "application/json"
    Reading(document(Router("test"))).check(operation.path, operation.answer, kind)


async def test_the_examples_of_what_is_read_and_of_errors_fit() -> None:
    described = document(Router("test"))
    reader = Reading(described)
    for path in READS:
        content = described["paths"][path]["get"]["responses"]["200"]["content"]
        reader.check(path, content["application/json"]["example"])
    assert READS.keys() == examples.READS.keys()
    for envelope in ENVELOPES:
        schema = described["components"]["schemas"][f"{envelope}Error"]
        for example in schema["examples"]:
            reader.fits({"$ref": f"#/components/schemas/{envelope}Error"}, example)


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


@pytest.mark.parametrize(
    "takes",
    dict.fromkeys(operation.takes for operation in OPERATIONS),
    ids=lambda one: one.__name__,
)
def test_a_model_may_be_left_out_or_empty_but_not_null_as_is_said(takes: type) -> None:
    """Schemathesis counts a body that its document allows, and that is always refused, as a lie."""
    [_], components = msgspec.json.schema_components([takes])
    schema = components[takes.__name__]
    field = schema["properties"].get("model")
    if field is None:
        return
    assert field == {"type": "string", "default": ""}
    assert "model" not in schema.get("required", ())
    with pytest.raises(msgspec.ValidationError, match=r"`str`, got `null` - at `\$.model`"):
        msgspec.json.decode(b'{"model": null}', type=takes)
