"""JSON schemas and examples of the types that decode requests and encode responses."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import msgspec

Json = dict[str, Any]
REFERENCE = "#/components/schemas/{name}"


def make_schemas(kinds: Iterable[Any]) -> tuple[dict[Any, Json], Json]:
    """Return the schema of each type, by type, and the components that the schemas refer to."""
    structs: dict[type[msgspec.Struct], None] = {}
    kinds = list(dict.fromkeys(kinds))
    for kind in kinds:
        _find_structs(kind, structs)
    known = [*structs, *(kind for kind in kinds if kind not in structs)]
    made, components = msgspec.json.schema_components(known, ref_template=REFERENCE)
    schemas = dict(zip(known, made, strict=True))
    for struct in structs:
        _describe_fields(struct, components[schemas[struct]["$ref"].rpartition("/")[2]])
    return schemas, components


def _find_structs(kind: Any, found: dict[type[msgspec.Struct], None]) -> None:
    """Add the structs that `kind` is made of to `found`."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        for part in get_args(kind):
            _find_structs(part, found)
    elif kind not in found:
        found[kind] = None
        for field in msgspec.structs.fields(kind):
            _find_structs(field.type, found)


def _describe_fields(struct: type[msgspec.Struct], component: Json) -> None:
    """Give each field its docstring; else the text and examples of what it may be besides null."""
    texts: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        texts |= _field_docstrings(base.__module__).get(base.__name__, {})
    for name, field in component.get("properties", {}).items():
        for branch in field.get("anyOf", ()):
            for key in {"description", "examples"} & branch.keys():
                field.setdefault(key, branch.pop(key))
        if name in texts:
            field["description"] = texts[name]


@cache
def _field_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of a module's classes: by class, then by field."""
    if module == "builtins" or module.startswith("msgspec"):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        node.name: dict(_iterate_docstrings(node.body))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def _iterate_docstrings(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                yield name, " ".join(text.split()).removesuffix(".")


def make_example(schema: Json, components: Json) -> Any:
    """Return a value that fits a schema: examples of fields, else the first value that fits.

    An object has the fields that are required, and those that have an example.
    """
    if "$ref" in schema and "examples" not in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    if values := schema.get("examples") or schema.get("enum"):
        return values[0]
    if branches := schema.get("anyOf"):
        null = {"type": "null"}
        return None if null in branches else make_example(branches[0], components)
    match schema.get("type"):
        case "object":
            return _make_object(schema, components)
        case "array":
            return [make_example(schema["items"], components)] if schema.get("items") else []
        case kind:
            return {"integer": 0, "number": 0.0, "string": "", "boolean": False}.get(kind or "")


def _make_object(schema: Json, components: Json) -> Json:
    if names := schema.get("propertyNames", {}).get("examples"):
        return {names[0]: make_example(schema["additionalProperties"], components)}
    required = schema.get("required", ())
    return {
        name: make_example(field, components)
        for name, field in schema.get("properties", {}).items()
        if name in required or "examples" in field or "propertyNames" in field
    }
