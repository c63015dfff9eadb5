"""Closes the objects of a JSON schema: they have the members that the schema lists, and no others.

JSON Schema allows an object any further members unless it says `additionalProperties: false`, and
schema generators such as pydantic leave that out. A small model that may write further members
writes them until `max_tokens`. All that a closed schema allows fits the schema itself. xgrammar in
vLLM and llama.cpp's server do the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from servekit.gateway.tool_parsing.grammars.schema_formats import walk_schema

#: A schema with one of these keywords states by itself which further members an object may have.
OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"} | {
    "anyOf",
    "allOf",
    "oneOf",
}
#: Keywords whose schemas may each list some of an object's members.
_PARTIAL = {"if", "then", "else", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
#: Keywords of a schema whose object another schema describes, and those by which it does so, too.
_JOINED = {"anyOf", "oneOf", "$ref", "allOf"}
_MEMBERS = {"properties", "required", "minProperties", "patternProperties"}


def close_objects(schema: Any) -> Any:
    """Return the schema with its objects closed; the same object if there are none to close.

    A schema that lists the members of one object in several places is left as it is.
    """
    found = list(walk_schema(schema))
    if not any(map(_is_listed, found)) or any(map(_is_partial, found)):
        return schema
    copy = msgspec.json.decode(msgspec.json.encode(schema))  # answers repeat the original
    for one in walk_schema(copy):
        if _is_listed(one):
            one["additionalProperties"] = False
    return copy


def _is_listed(schema: dict[str, Any]) -> bool:
    """Return whether an object's members are listed, and no others are asked for."""
    members = schema.get("properties")
    if not isinstance(members, dict) or not members or OPEN & schema.keys():
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in members for name in required)
        and isinstance(least, int)
        and least <= len(members)
    )


def _is_partial(schema: dict[str, Any]) -> bool:
    several, keywords = schema.get("allOf"), schema.keys()
    return (
        bool(_PARTIAL & keywords)
        or (isinstance(several, list) and len(several) > 1)
        or bool(_JOINED & keywords and _MEMBERS & keywords)
    )
