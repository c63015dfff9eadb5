"""The environments of engines, as `servekit engine list` shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from servekit.cli.display.tables import new_table
from servekit.config.engines.environments import Environment, engines_of, list_environments
from servekit.units import format_bytes


def describe_environments(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a description of each environment, finished or not, as JSON has it."""
    return [_describe(folder, found) for folder, found in list_environments(environ)]


def _describe(folder: Path, found: Environment | str) -> dict[str, Any]:
    files = (file for file in folder.rglob("*") if not file.is_dir())
    version, engines, trouble = "", list[str](), ""
    if isinstance(found, str):
        trouble = found
    else:
        version, engines = ".".join(map(str, found.version)), engines_of(found)
    return {
        "name": folder.name,
        "path": str(folder),
        "python": version,
        "engines": engines,
        "bytes": sum(file.lstat().st_blocks * 512 for file in files),
        "trouble": trouble,
    }


def environment_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of `engine list`."""
    table = new_table("NAME", "PYTHON", "SIZE", "ENGINES", "PATH")
    for one in found:
        engines = one["trouble"] or ", ".join(one["engines"]) or "no engine of servekit"
        table.add_row(one["name"], one["python"], format_bytes(one["bytes"]), engines, one["path"])
    return table
