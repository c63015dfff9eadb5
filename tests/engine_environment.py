"""Virtual environments as small as can be: without pip, with copies of single packages."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import venv
from collections.abc import Iterable
from pathlib import Path


def make_environment(folder: Path, copies: Iterable[str] = ()) -> Path:
    """Make an environment with copies of our own packages; return its interpreter."""
    venv.create(folder, symlinks=True)
    there = site_packages(folder)
    for name in copies:
        for file in importlib.metadata.files(name) or ():
            target = there / str(file)
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    return folder / "bin" / "python"


def add_package(folder: Path, name: str, version: str, module: str = "") -> None:
    """Install a package into the environment that is nothing but its name and version."""
    there = site_packages(folder)
    info = there / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if module:
        (there / module).mkdir(exist_ok=True)
        (there / module / "__init__.py").touch()


def site_packages(folder: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"
