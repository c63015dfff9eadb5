"""Packages of other people, put on a path as pip would put them: modules and metadata."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path


def install_plugin(source: Path, site: Path) -> Path:
    """Install the package whose pyproject.toml lies in `source` into `site`; return `site`."""
    settings = tomllib.loads((source / "pyproject.toml").read_text())
    project = settings["project"]
    name, version = project["name"], project["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(line for group in groups for line in group))
    for module in settings["tool"]["setuptools"]["py-modules"]:
        shutil.copy(source / f"{module}.py", site)
    return site


def path_with(site: Path) -> dict[str, str]:
    """Return the environment in which the packages of `site` are found."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{site}:{before}" if before else str(site)}
