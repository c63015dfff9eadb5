"""Commands that start a Python interpreter: our own, or that of another environment."""

from __future__ import annotations

import sys
from pathlib import Path

import servekit


def module_command(name: str, python: str = "") -> tuple[str, ...]:
    """Return the command for `python -m NAME`, with `-P` unless we run from the source folder.

    `python` is the interpreter of another environment.

    With `-m`, Python puts the working directory first on its path, and a user's file with the name
    of a module (random.py) would break every child.
    """
    if python:
        return python, "-P", "-m", name
    if not sys.flags.safe_path and _is_in_source_folder():
        return sys.executable, "-m", name
    return sys.executable, "-P", "-m", name


def _is_in_source_folder() -> bool:
    try:
        return Path.cwd() == Path(servekit.__file__).resolve().parents[1]
    except FileNotFoundError:  # somebody has removed the working directory
        return False
