"""The reference of the HTTP API, from its OpenAPI document."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

from servekit.docs.pages import make_anchor
from tests.reference import fields

Json = dict[str, Any]
_METHODS = ("get", "post", "put", "patch", "delete")


def document() -> Json:
    """Return the /openapi.json of an instance that serves everything."""
    return asyncio.run(_document())


async def _document() -> Json:
    from servekit.gateway.app import Application
    from servekit.gateway.routing.router import Router

    return Application(Router("docs"), 2**23, ui=True, legacy=True).rest.openapi()


def make_sections() -> str:
    """Return Markdown: the endpoints by their API, and the objects they take and give."""
    described = document()
    schemas: Json = described["components"]["schemas"]
    parts: list[str] = []
    for tag, operations in _by_tag(described).items():
        parts.append(f"## {tag} endpoints")
        for method, path, operation in operations:
            parts += [f"### {method.upper()} {path}", *_operation(operation)]
    parts.append("## Objects")
    for name, schema in sorted(schemas.items(), key=lambda one: _short(one[0])):
        parts += [f"### {_short(name)}", *_schema(schema)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _by_tag(described: Json) -> dict[str, list[tuple[str, str, Json]]]:
    found: dict[str, list[tuple[str, str, Json]]] = {}
    for path, methods in described["paths"].items():
        for method in _METHODS:
            if method in methods:
                tag = methods[method].get("tags", ["service"])[0]
                found.setdefault(tag, []).append((method, path, methods[method]))
    return found


def _operation(operation: Json) -> Iterator[str]:
    yield f"{operation.get('summary', '')}."
    yield str(operation.get("description", ""))
    rows = [_parameter(one) for one in operation.get("parameters", ())]
    if rows:
        yield "\n".join(["| parameter | in | value | |", "|---|---|---|---|", *rows])
    if body := operation.get("requestBody"):
        yield f"Takes {_contents(body)}."
    answers = operation["responses"].items()
    lines = [
        f"| {code} | {_cell(one['description'])} | {_contents(one)} |" for code, one in answers
    ]
    yield "\n".join(["| status | | |", "|---|---|---|", *lines])


def _parameter(one: Json) -> str:
    told = one.get("description", "")
    return f"| `{one['name']}` | {one['in']} | {fields.kind(one['schema'], _link)} | {told} |"


def _contents(one: Json) -> str:
    found = one.get("content", {}).items()
    return "; ".join(f"{_kind(media['schema'])} as `{name}`" for name, media in found)


def _kind(schema: Json) -> str:
    data = schema.get("properties", {}).get("data", {})
    events = data.get("anyOf", [data])[0].get("contentSchema", {}) or {}
    return fields.kind(events, _link) if events else fields.kind(schema, _link)


def _schema(schema: Json) -> Iterator[str]:
    yield _cell(schema.get("description", ""))
    required = schema.get("required", ())
    rows = [
        f"| `{key}` | {fields.kind(field, _link)} | "
        f"{'**required**' if key in required else fields.default(field.get('default'))} | "
        f"{_cell(field.get('description', ''))} |"
        for key, field in schema.get("properties", {}).items()
    ]
    yield "\n".join(["| field | value | default | |", "|---|---|---|---|", *rows]) if rows else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _short(name: str) -> str:
    """Shorten a schema's name; a prefix distinguishes those of other APIs from OpenAI's."""
    module, _, last = name.rpartition(".")
    other = re.search(r"(ollama|anthropic|responses)", module)
    return f"{other[1].capitalize()}{last}" if other else last


def _link(name: str) -> str:
    short = _short(name)
    return f"[{short}](#{make_anchor(short)})"
