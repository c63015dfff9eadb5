"""The nodes of a configuration file: values with their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from servekit.errors import ConfigError

Scalar = None | bool | int | float | str
Loc = Sequence[str | int]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the file; line and column count from 1."""

    line: int
    column: int


@dataclass(slots=True)
class Node:
    """A value. `text` is a scalar as written."""

    mark: Mark
    value: Scalar | list[Node] | dict[str, Node]
    text: str = ""
    keys: dict[str, Mark] = field(default_factory=dict)  # of a mapping
    size: int = 1  # nodes, aliases expanded


class DocumentError(ConfigError):
    """The file is not one valid YAML document. `mark` is None if no line is to blame."""

    def __init__(self, message: str, mark: Mark | None = None) -> None:
        super().__init__(message)
        self.mark = mark


def format_place(path: Path, mark: Mark | None) -> str:
    return f"{path}:{mark.line}:{mark.column}" if mark else str(path)


def plain_value(node: Node) -> Scalar | list[object] | dict[str, object]:
    """Return the bare values. An empty key counts as absent."""
    if isinstance(node.value, dict):
        return {k: plain_value(n) for k, n in node.value.items() if n.value is not None}
    if isinstance(node.value, list):
        return [plain_value(n) for n in node.value]
    return node.value


@dataclass(frozen=True, slots=True)
class Found:
    """The result of `find_node`: node, mark to blame, and how much of the location exists."""

    node: Node
    key: Mark  # of the key, else of the value
    depth: int


def find_node(root: Node, loc: Loc) -> Found:
    """Follow `loc` as far as it goes."""
    node, key = root, root.mark
    for depth, part in enumerate(loc):
        if isinstance(node.value, dict) and part in node.value:
            node, key = node.value[str(part)], node.keys[str(part)]
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            key = node.mark
        else:
            return Found(node, key, depth)
    return Found(node, key, len(loc))


def mark_at(text: str, index: int) -> Mark:
    return Mark(text.count("\n", 0, index) + 1, index - (text.rfind("\n", 0, index) + 1) + 1)
