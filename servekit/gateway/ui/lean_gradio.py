"""Gradio without what a gateway has no use for: half of its start, and a wake-up each second."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any


def import_gradio() -> None:
    """Import gradio, which writes no type stubs meanwhile and looks for no expired states later.

    It parses the source of each component to renew a stub for editors beside it, unless the
    component has no file. States expire if they have a `time_to_live`, which no page sets.
    """
    find_file = inspect.getfile

    def find_file_elsewhere(object: Any) -> str:
        if isinstance(object, type) and object.__module__.startswith("gradio."):
            raise OSError("the class is not looked up while gradio is imported")
        return find_file(object)

    setattr(inspect, "getfile", find_file_elsewhere)  # noqa: B010
    try:
        from gradio import route_utils
    finally:
        setattr(inspect, "getfile", find_file)  # noqa: B010
    setattr(route_utils, "_delete_state", _delete_no_state)  # noqa: B010


async def _delete_no_state(app: Any) -> None:
    """Return at once; Gradio's own looks each second."""


@contextlib.contextmanager
def build_without_apps() -> Iterator[None]:
    """Have `gradio.Blocks` build no application meanwhile.

    They build one after each page, with ninety routes. `Blocks.queue` builds the one that the queue
    uses, and `mount_gradio_app` the one that serves.
    """
    from gradio import blocks

    module: Any = blocks
    app = module.App
    module.App = _NoApp
    try:
        yield
    finally:
        module.App = app


class _NoApp:
    @staticmethod
    def create_app(*_: Any, **__: Any) -> None:
        """Build none."""
