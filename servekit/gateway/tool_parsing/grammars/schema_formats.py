"""Removes string `format`s that the JSON-schema compiler does not know.

JSON Schema treats unknown formats as annotations, and schema generators write many: pydantic
`password`, `path` or `binary`, OpenAPI `int32`. llguidance would refuse the whole schema. Source:
JSON Schema draft 2020-12, Validation, 7.2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from servekit.gateway.http.request_limits import subschemas

#: The formats that llguidance enforces.
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)


def without_unknown_formats(schema: Any) -> Any:
    """Return the schema without unknown formats; the same object if there are none."""
    if not any(map(_is_unknown, walk_schema(schema))):
        return schema
    copy = msgspec.json.decode(msgspec.json.encode(schema))  # answers repeat the original
    for one in walk_schema(copy):
        if _is_unknown(one):
            del one["format"]
    return copy


def walk_schema(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all of its subschemas."""
    found = [schema] if isinstance(schema, dict) else []
    while found:
        one = found.pop()
        yield one
        found += subschemas(one)


def _is_unknown(schema: dict[str, Any]) -> bool:
    format = schema.get("format")
    return isinstance(format, str) and format not in FORMATS
