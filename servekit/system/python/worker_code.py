"""servekit's code for a worker in another Python environment: a folder for its PYTHONPATH.

The folder holds links to this servekit, and to the packages of pure Python that a worker needs and
that its environment lacks, and to nothing else: no package of servekit's own environment can meet
one of the engine's. Processes that the engine starts inherit the variable, and find servekit too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Collection
from pathlib import Path

import servekit

#: Packages of pure Python without dependencies, which a worker imports.
BROUGHT = ("structlog",)


def make_code_folder(parent: Path, lacking: Collection[str]) -> Path:
    """Return the folder of links below `parent`, made if it is not there; `lacking` are of BROUGHT.

    Raises OSError.
    """
    folder = parent / "-".join(("python", *sorted(lacking)))
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("servekit", *lacking):
        link, package = folder / name, _find_package(name)
        if not link.is_symlink() or link.readlink() != package:
            fresh = folder / f".{name}.{os.getpid()}"
            with contextlib.suppress(FileNotFoundError):
                fresh.unlink()
            fresh.symlink_to(package)
            fresh.replace(link)
    return folder


def _find_package(name: str) -> Path:
    if name == "servekit":
        return Path(servekit.__file__).resolve().parent
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None  # servekit depends on it
    return Path(spec.origin).resolve().parent
