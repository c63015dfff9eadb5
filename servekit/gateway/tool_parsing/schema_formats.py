"""The `format`s of strings that a JSON schema's compiler knows; any other says nothing to it.

JSON Schema has unknown formats be annotations, and generators of schemas write many: pydantic
`password`, `path` or `binary`, OpenAPI `int32`. llguidance would refuse the whole schema.
Source: JSON Schema draft 2020-12, Validation, 7.2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from servekit.gateway.http.request_limits import subschemas

#: What llguidance keeps to.
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)


def without_unknown_formats(schema: Any) -> Any:
    """The schema without the formats that nothing keeps to; itself, if it has none."""
    if not any(map(_is_unknown, _all(schema))):
        return schema
    copy = msgspec.json.decode(msgspec.json.encode(schema))  # the request's own may be told again
    for one in _all(copy):
        if _is_unknown(one):
            del one["format"]
    return copy


def _all(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and those within it, however deep."""
    found = [schema] if isinstance(schema, dict) else []
    while found:
        one = found.pop()
        yield one
        found += subschemas(one)


def _is_unknown(schema: dict[str, Any]) -> bool:
    format = schema.get("format")
    return isinstance(format, str) and format not in FORMATS
