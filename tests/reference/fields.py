"""Fields of a JSON schema as Markdown rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Field = dict[str, Any]
#: A function that names the target of a `$ref`.
Name = Callable[[str], str]

_NAMES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "yes or no",
    "null": "null",
}


def row(key: str, field: Field, *, required: bool) -> str:
    """Return the row `| key | value | default | description |`."""
    value = "**required**" if required else default(field.get("default"))
    return f"| `{key}` | {kind(field)} | {value} | {field['description']} |".replace("`[]`", "")


def default(value: object) -> str:
    """Format a default value; "" for an empty one."""
    if value in (None, "", [], {}) or isinstance(value, dict):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _mapping(reference: str) -> str:
    return "mapping"


def kind(field: Field, name: Name = _mapping) -> str:
    """Describe the values of a field."""
    if reference := field.get("$ref"):
        return name(reference.rpartition("/")[2])
    if choices := field.get("enum"):
        return " or ".join(f"`{choice}`" for choice in choices)
    if "const" in field:
        return f"`{field['const']}`"
    if branches := field.get("anyOf", field.get("oneOf")):
        if short := next((one["examples"][0] for one in branches if "examples" in one), ""):
            return f"{kind(branches[0], name)}; or such as `{short}`"
        kinds = [kind(branch, name) for branch in branches if branch.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if field.get("type") == "array":
        items = field.get("items")
        return f"list of {kind(items, name)}" if isinstance(items, dict) else "list"
    return _NAMES.get(field.get("type", ""), "mapping") + _range(field)


def _range(field: Field) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above = field.get("exclusiveMinimum")
    if low is not None and high is not None:
        return f", {_plain(low)} to {_plain(high)}"
    if above is not None:
        return f", over {_plain(above)}" + (f" to {_plain(high)}" if high is not None else "")
    return f" ≥ {_plain(low)}" if low is not None else ""


def _plain(bound: float) -> str:
    """Return a bound with all of its digits, as an error message has it."""
    return str(int(bound) if bound == int(bound) else bound)
