"""The chain of imports in progress, read off the stack.

Uses the standard library only, since it runs in any traced program.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import List, Optional, Tuple

#: Files of Python's import machinery.
_MACHINERY = ("<frozen importlib._bootstrap", "<frozen importlib._bootstrap_external")
_PATHS = ("/importlib/__init__.py", "/importlib/_bootstrap.py")

Step = Tuple[str, str, int]  # module, file, line


def is_machinery(filename: str) -> bool:
    """Return whether frames of that file belong to Python's import machinery."""
    return filename.startswith(_MACHINERY) or filename.endswith(_PATHS)


def importers(frame: Optional[FrameType] = None) -> List[Step]:
    """Return the importing frames, outermost first, as module, file and line.

    The module that the innermost frame imports is not included.
    """
    found: List[Step] = []
    within = False
    frame = frame or sys._getframe(1)
    while frame is not None:
        machinery = is_machinery(frame.f_code.co_filename)
        if within and not machinery:
            name = str(frame.f_globals.get("__name__", "?"))
            found.append((name, frame.f_code.co_filename, frame.f_lineno))
        within, frame = machinery, frame.f_back
    return found[::-1]


def modules_under_way(frame: Optional[FrameType] = None) -> List[str]:
    """Return the modules being imported, outermost first; [] outside any import."""
    steps = importers(frame)
    names = [step[0] for step in steps]
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            last = str(frame.f_globals.get("__name__", "?"))
            return [*names, last] if steps and last != names[-1] else names
        frame = frame.f_back
    return names
