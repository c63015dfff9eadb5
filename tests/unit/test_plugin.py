"""servekit.plugin: the names that engines of other packages import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from servekit import plugin
from servekit.engines.api.base import Engine


def test_every_name_is_the_same_object_as_at_home() -> None:
    assert plugin.Engine is Engine
    assert all(getattr(plugin, name) is not None for name in dir(plugin))


def test_type_checkers_see_the_names_that_can_be_imported() -> None:
    tree = ast.parse(Path(plugin.__file__).read_text())
    seen = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert seen == set(dir(plugin))


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = plugin.Nothing


@pytest.mark.parametrize(
    ("name", "absent"), [("EngineKind", "servekit.engines"), ("Engine", "pydantic")]
)
def test_a_name_brings_no_other_side_with_it(name: str, absent: str) -> None:
    code = f"import sys; from servekit.plugin import {name}; print({absent!r} in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
