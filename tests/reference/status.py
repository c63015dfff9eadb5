"""The reference of `servekit ps --json`, from the types of the supervisor's answer."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from servekit.docs.pages import make_anchor

_NAMES = {str: "text", int: "whole number", float: "number", bool: "yes or no", bytes: "bytes"}


def make_tables() -> str:
    """Return a section with a table of fields for each object of the document."""
    from servekit.protocol.messages import Status

    parts = []
    for kind in dict.fromkeys(_walk(Status)):
        title = "The document" if kind is Status else kind.__name__
        first = "" if kind is Status else (inspect.getdoc(kind) or "").partition("\n")[0]
        parts += [f"## {title}", first, _table(kind)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _walk(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """Yield a struct and all structs within it."""
    yield kind
    for hint in typing.get_type_hints(kind).values():
        for inner in _structs(hint):
            yield from _walk(inner)


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in typing.get_args(hint):
        yield from _structs(argument)


def _table(kind: type[msgspec.Struct]) -> str:
    told = _comments(kind)
    rows = [
        f"| `{name}` | {_describe(hint)} | {told.get(name, '')} |"
        for name, hint in typing.get_type_hints(kind).items()
    ]
    return "\n".join(["| field | value | |", "|---|---|---|", *rows])


def _describe(hint: Any) -> str:
    """Return a type in words, with links to objects."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is types.NoneType:
        return "null"
    if hint in _NAMES:
        return _NAMES[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"[{hint.__name__}](#{make_anchor(hint.__name__)})"
    if origin is Literal:
        return " or ".join(f"`{choice}`" if choice else "empty" for choice in arguments)
    if origin in (tuple, list):
        kinds = dict.fromkeys(_describe(one) for one in arguments if one is not Ellipsis)
        return f"list of {' and '.join(kinds)}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(one) for one in arguments)
    return "mapping"


def _comments(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comment of each field: at the end of its line, or above it with `#:`."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node in definition.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        after = lines[(node.end_lineno or 1) - 1][node.end_col_offset or 0 :]
        above: list[str] = []
        at = node.lineno - 2
        while at >= 0 and lines[at].strip().startswith("#:"):
            above.insert(0, lines[at].strip().removeprefix("#:").strip())
            at -= 1
        text = after.strip().removeprefix("#").strip() or " ".join(above)
        found[node.target.id] = text.replace("|", "\\|").replace("None", "null")
    return found
