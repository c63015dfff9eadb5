"""Who imports whom right now, read off the stack. Stdlib only: it runs in any traced program."""

from __future__ import annotations

import sys
from types import FrameType
from typing import List, Optional, Tuple

#: Where the import statement's own machinery stands.
_MACHINERY = ("<frozen importlib._bootstrap", "<frozen importlib._bootstrap_external")
_PATHS = ("/importlib/__init__.py", "/importlib/_bootstrap.py")

Step = Tuple[str, str, int]  # module, file, line


def is_machinery(filename: str) -> bool:
    """Whether a frame of that file is Python's importing itself, and no one's own code."""
    return filename.startswith(_MACHINERY) or filename.endswith(_PATHS)


def importers(frame: Optional[FrameType] = None) -> List[Step]:
    """The frames that are importing right now, outermost first: module, file and line of each.

    What the innermost one imports is not among them.
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
    """The modules that importing has brought under way, outermost first; [] outside any import."""
    steps = importers(frame)
    names = [step[0] for step in steps]
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            last = str(frame.f_globals.get("__name__", "?"))
            return [*names, last] if steps and last != names[-1] else names
        frame = frame.f_back
    return names
