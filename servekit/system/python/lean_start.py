"""Less work at the start of our processes: an import of structlog without rich, less collection."""

from __future__ import annotations

import gc
import sys


def import_structlog() -> None:
    """Import structlog as if rich were not installed; later imports of rich find it.

    structlog loads rich to draw tracebacks on a terminal. Gateways and workers write JSON, and rich
    would take 5 MB of each.
    """
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # Python's way to say: not here
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


def collect_less() -> None:
    """Collect garbage less often than Python does by default; call it before the imports.

    They make a hundred thousand objects that stay: looking through them over and over takes a tenth
    of a start. Requests later make few cycles.
    """
    gc.set_threshold(10_000, 20, 50)
