"""Engines by registry name. Importing this package imports no engine and no torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from servekit.errors import LoadError

if TYPE_CHECKING:
    from servekit.engines.base import Engine
    from servekit.wire.messages import WorkerSpec

#: Registry name to "module:class"; imported only in the worker that runs it.
ENGINES = {
    "echo": "servekit.engines.echo:EchoEngine",
    "transformers": "servekit.engines.transformers:TransformersEngine",
}


def create(spec: WorkerSpec) -> Engine:
    """Make the engine that `spec.engine` names. Raises LoadError if there is none."""
    target = ENGINES.get(spec.engine)
    if target is None:
        raise LoadError(f"there is no engine {spec.engine!r}; known: {', '.join(sorted(ENGINES))}")
    module, _, name = target.partition(":")
    with _no_collections():
        kind = getattr(import_module(module), name)
    engine: Engine = kind(spec)
    return engine


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """An import makes many objects and next to no garbage; to look for some takes a third of it.

    What it has made stays for good, and is not looked at again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
