"""The walks through the code name modules, classes and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import servekit

PACKAGE = Path(servekit.__file__).parent
PAGE = (PACKAGE / "docs/pages/internals/walks.md").read_text()
#: A module, and the class or function that follows it.
PLACES = re.findall(r"`((?:\w+/)+\w+\.py)`(?: `([\w.]+)`)?", PAGE)


def test_the_page_has_places() -> None:
    assert len(PLACES) > 30


@pytest.mark.parametrize(("module", "name"), sorted(set(PLACES)))
def test_a_place_exists(module: str, name: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text())
    for part in filter(None, name.split(".")):
        found = [one for one in ast.iter_child_nodes(tree) if part in _names(one)]
        assert found, f"{module} has no {name}"
        tree = found[0]  # type: ignore[assignment]


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
