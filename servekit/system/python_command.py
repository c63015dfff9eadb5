"""How our own interpreter is started once more."""

from __future__ import annotations

import sys
from pathlib import Path


def module(name: str) -> tuple[str, ...]:
    """The command for `python -m NAME`; with `-P` unless we stand in the working directory.

    With `-m`, Python puts the working directory first on its path, and a file of the user's that
    is called like a module (random.py) would break every child.
    """
    package_parent = Path(__file__).resolve().parents[2]
    if package_parent == Path.cwd() and not sys.flags.safe_path:
        return sys.executable, "-m", name
    return sys.executable, "-P", "-m", name
