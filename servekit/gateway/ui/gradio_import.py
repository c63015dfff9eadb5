"""An import of gradio that writes no type stubs.

gradio parses the source of each of its components while it is imported, to renew a stub for editors
beside it: more than half of the time that the import takes.
"""

from __future__ import annotations

import inspect
from typing import Any


def import_gradio() -> None:
    """Import gradio, and keep the files of its classes from it: without one it writes no stub."""
    find_file = inspect.getfile

    def find_file_elsewhere(object: Any) -> str:
        if isinstance(object, type) and object.__module__.startswith("gradio."):
            raise OSError("the class is not looked up while gradio is imported")
        return find_file(object)

    setattr(inspect, "getfile", find_file_elsewhere)  # noqa: B010
    try:
        import gradio  # noqa: F401
    finally:
        setattr(inspect, "getfile", find_file)  # noqa: B010
