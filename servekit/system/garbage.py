"""How often Python looks for garbage in a process of ours."""

from __future__ import annotations

import gc


def collect_less() -> None:
    """Collect garbage less often than Python does by default; call it before the imports.

    They make a hundred thousand objects that stay: looking through them over and over takes a tenth
    of a start. Requests later make few cycles.
    """
    gc.set_threshold(10_000, 20, 50)
