"""Engines by registry name. Importing this package imports no engine and no torch.

`api` is the interface, a folder for each engine, `text` and `model_files` for all of them. Engines
of other packages are entry points of the group `servekit.engines`.
Only the worker and fork servers may import from here.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from typing import TYPE_CHECKING

from servekit.engines.api.load_phases import phase
from servekit.errors import LoadError

if TYPE_CHECKING:
    from servekit.engines.api.base import Engine, Report
    from servekit.protocol.messages import WorkerSpec

#: Registry name to "module:class"; imported only in the worker that runs it.
ENGINES = {
    "echo": "servekit.engines.echo.engine:EchoEngine",
    "llamacpp": "servekit.engines.llamacpp.engine:LlamaCppEngine",
    "openai": "servekit.engines.remote.engine:OpenAIEngine",
    "transformers": "servekit.engines.transformers.engine:TransformersEngine",
    "vllm": "servekit.engines.vllm.engine:VllmEngine",
}

#: What takes long to import of what an engine needs, in this order; each is a phase of its own.
LIBRARIES = {
    "transformers": ("torch", "transformers"),
    "vllm": ("torch", "transformers", "vllm"),
}

#: Engines whose files are brought by `source`, and whether they load a GGUF file's conversion.
FETCHES = {"transformers": True, "vllm": True, "llamacpp": False}

#: The entry points of other packages' engines, "module:class" as here.
GROUP = "servekit.engines"


def create(spec: WorkerSpec) -> Engine:
    """Make the engine that `spec.engine` names. Raises LoadError if there is none."""
    return _kind(spec.engine)(spec)


def fetch_ahead(spec: WorkerSpec, report: Report) -> None:
    """Begin to fetch the model's files, so that `create` may import meanwhile."""
    if (converts := FETCHES.get(spec.engine)) is not None:
        from servekit.engines.model_files import prefetch

        prefetch.begin(spec, report, converts=converts)


def prepare(spec: WorkerSpec) -> None:
    """Do for `spec`'s engine what takes long and touches no device: this process will fork.

    Raises LoadError.
    """
    _kind(spec.engine).prepare(spec)


def reborn() -> None:
    """Be a process of its own after a fork. Raises LoadError if CUDA stands in the way."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        raise LoadError("a library has initialised CUDA on import, and CUDA survives no fork")
    torch.seed()  # else all that are forked draw the same numbers
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _kind(name: str) -> type[Engine]:
    target = ENGINES.get(name)
    if target is None:
        return _brought(name)
    module, _, attribute = target.partition(":")
    with _no_collections():
        for library in LIBRARIES.get(name, ()):
            with phase(library):
                import_module(library)
        with phase("engine"):
            kind: type[Engine] = getattr(import_module(module), attribute)
    return kind


def _brought(name: str) -> type[Engine]:
    """The engine of another package; the supervisor has seen that there is one of that name."""
    from servekit.engines.api.base import Engine

    entry = next(iter(metadata.entry_points(group=GROUP, name=name)), None)
    if entry is None:
        raise LoadError(f"there is no engine {name!r}; known: {', '.join(sorted(ENGINES))}")
    try:
        with _no_collections():
            kind = entry.load()
    except Exception as error:  # it is not our code
        what = f"{type(error).__name__}: {error}"
        raise LoadError(
            f"the engine {name!r} ({entry.value}) cannot be imported: {what}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Engine)):
        raise LoadError(f"the engine {name!r} ({entry.value}) is no subclass of Engine")
    return kind


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
