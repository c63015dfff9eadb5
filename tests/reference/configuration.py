"""The reference of the configuration file, from its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from servekit.config.json_schema import json_schema
from tests.reference import fields

#: The head of each table.
_HEAD = "| key | value | default | |\n|---|---|---|---|"


def make_tables() -> str:
    """Return Markdown: a section for each mapping of the file, and for each engine's options."""
    schema = json_schema()
    sections: dict[str, Any] = schema["$defs"]
    parts = ["## The top of the file", _section("", schema)]
    for path, name in _nested("", schema, sections):
        parts += [f"## {path.removesuffix('.')}", _about(sections[name])]
        parts.append(_section(path, sections[name]))
    for engine, name in _engines(sections):
        parts += [f"## Options of {engine}", _about(sections[name])]
        parts.append(_section("models[].options.", sections[name]))
        for path, nested in _nested("models[].options.", sections[name], sections):
            parts += [f"### {path.removesuffix('.')}", _about(sections[nested])]
            parts.append(_section(path, sections[nested]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _engines(sections: Any) -> list[tuple[str, str]]:
    rules = sections["ModelConfig"]["allOf"]
    return [_engine(rule) for rule in rules if "properties" in rule["then"]]


def _section(prefix: str, section: Any) -> str:
    required = section.get("required", ())
    rows = [
        fields.row(f"{prefix}{key}", field, required=key in required)
        for key, field in section.get("properties", {}).items()
    ]
    return "\n".join([_HEAD, *rows]) if rows else "It has none."


def _about(section: Any) -> str:
    return str(section.get("description", ""))


def _nested(prefix: str, section: Any, sections: Any) -> Iterator[tuple[str, str]]:
    """Yield the mappings within a section: the prefix of their keys, and their names."""
    for key, field in section["properties"].items():
        for name, is_list in _references(field):
            path = f"{prefix}{key}{'[]' if is_list else ''}."
            yield path, name
            yield from _nested(path, sections[name], sections)


def _references(field: Any) -> Iterator[tuple[str, bool]]:
    for branch in (field, *field.get("anyOf", ()), *field.get("oneOf", ())):
        if "$ref" in branch:
            yield branch["$ref"].rpartition("/")[2], False
        if branch.get("type") == "array" and "$ref" in branch.get("items", {}):
            yield branch["items"]["$ref"].rpartition("/")[2], True


def _engine(rule: Any) -> tuple[str, str]:
    engine = rule["if"]["properties"]["engine"]["const"]
    target = rule["then"]["properties"]["options"]["$ref"]
    return engine, target.rpartition("/")[2]
