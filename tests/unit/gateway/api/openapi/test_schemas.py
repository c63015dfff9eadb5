"""Schemas and examples that are made of types, with the texts that stand at their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import UNSET, Struct, UnsetType

from servekit.gateway.api.fields import doc, unserved
from servekit.gateway.api.openapi.operation import Operation
from servekit.gateway.api.openapi.schemas import REFERENCE, make_example, make_schemas


class Inner(Struct):
    """What is within."""

    size: Annotated[int, doc("How much", 7, ge=1)]


class Base(Struct, kw_only=True):
    """What both have."""

    name: str = ""
    """The name,
    in two lines."""
    plain: int = 0


class Outer(Base, kw_only=True):
    """What is around."""

    inner: Inner
    others: Annotated[list[Inner], doc("The others")]
    maybe: Annotated[str, doc("A text", "an example")] | None = None
    unset: Annotated[int, doc("A number", 3)] | UnsetType = UNSET
    kind: Literal["a", "b"] = "a"
    odd: Annotated[Any, unserved(False, instead="use kind")] = None


def made(*kinds: Any) -> tuple[dict[Any, Any], dict[str, Any]]:
    return make_schemas(kinds)


def fields_of(kind: type[Struct]) -> dict[str, Any]:
    _, components = made(kind)
    fields: dict[str, Any] = components[kind.__name__]["properties"]
    return fields


def test_a_type_is_referred_to_and_its_parts_are_components() -> None:
    schemas, components = made(Outer, list[Inner], Outer, str)
    assert schemas[Outer] == {"$ref": REFERENCE.format(name="Outer")}
    assert schemas[str] == {"type": "string"}
    assert schemas[list[Inner]]["items"] == {"$ref": REFERENCE.format(name="Inner")}
    assert set(components) == {"Outer", "Inner"}
    assert components["Inner"]["description"] == "What is within."


def test_a_field_has_its_docstring_also_from_the_class_before() -> None:
    fields = fields_of(Outer)
    assert fields["name"]["description"] == "The name, in two lines"
    assert "description" not in fields["plain"]
    assert fields["others"]["description"] == "The others"


def test_a_field_that_may_be_null_has_the_text_of_what_it_may_be_besides() -> None:
    field = fields_of(Outer)["maybe"]
    assert (field["description"], field["examples"]) == ("A text", ["an example"])
    assert {"type": "null"} in field["anyOf"] and {"type": "string"} in field["anyOf"]


def test_a_parameter_that_is_not_served_says_what_to_do_and_takes_what_asks_nothing() -> None:
    field = fields_of(Outer)["odd"]
    assert field["description"] == "Not supported; use kind"
    assert field["enum"] == [None, False]


def test_bounds_are_in_the_schema() -> None:
    assert fields_of(Inner)["size"]["minimum"] == 1


def test_an_example_has_what_is_required_and_what_has_an_example() -> None:
    schemas, components = made(Outer)
    example = make_example(schemas[Outer], components)
    assert example == {
        "inner": {"size": 7}, "others": [{"size": 7}], "maybe": "an example", "unset": 3
    }  # fmt: skip
    assert msgspec.convert(example, Outer).inner.size == 7


@pytest.mark.parametrize(
    ("schema", "example"),
    [
        ({"type": "integer"}, 0),
        ({"type": "number"}, 0.0),
        ({"type": "string"}, ""),
        ({"type": "boolean"}, False),
        ({"type": "null"}, None),
        ({}, None),
        ({"type": "array"}, []),
        ({"type": "array", "items": {"type": "integer"}}, [0]),
        ({"enum": ["a", "b"]}, "a"),
        ({"type": "string", "examples": ["x", "y"]}, "x"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ""),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ({"type": "object"}, {}),
        (
            {
                "type": "object",
                "propertyNames": {"examples": ["key"]},
                "additionalProperties": {"type": "integer"},
            },
            {"key": 0},
        ),
        ({"$ref": "#/components/schemas/A"}, "from the component"),
        ({"$ref": "#/components/schemas/A", "examples": ["own"]}, "own"),
    ],
)
def test_an_example_fits_its_schema(schema: dict[str, Any], example: Any) -> None:
    components = {"A": {"type": "string", "examples": ["from the component"]}}
    assert make_example(schema, components) == example


def test_an_answer_that_is_no_object_is_plain_text() -> None:
    assert not Operation("/a", "A", Inner, Outer).plain
    assert Operation("/a", "A", Inner, "text/plain").plain
    assert Operation("/a", "A", Inner, str).plain
