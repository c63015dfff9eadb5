"""An import of structlog that leaves out rich.

structlog loads rich, if it is installed, to draw tracebacks on a terminal. Gateways and workers
write JSON, and rich would take 5 MB of each.
"""

from __future__ import annotations

import sys


def import_structlog() -> None:
    """Import structlog as if rich were not installed; later imports of rich find it."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # Python's way to say: not here
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
