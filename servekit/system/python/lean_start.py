"""Less work at the start of our processes: an import of structlog without rich, less collection."""

from __future__ import annotations

import gc
import sys


def import_structlog() -> None:
    """Import structlog as if rich and greenlet were not installed; later imports find them.

    structlog loads rich to draw tracebacks on a terminal, and greenlet for loggers of such threads.
    Our processes have neither, and the two would take 5 and 2 MB of each.
    """
    hidden = {"rich", "greenlet"} - sys.modules.keys()
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to say: not here
    try:
        import structlog  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


def collect_less() -> None:
    """Collect garbage less often than Python does by default; call it before the imports.

    They make a hundred thousand objects that stay: looking through them over and over takes a tenth
    of a start. Requests later make few cycles.
    """
    gc.set_threshold(10_000, 20, 50)
