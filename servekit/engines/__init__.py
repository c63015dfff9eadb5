"""The registry of engines. Importing this package imports no engine and no torch.

`api` is the engine interface; `text`, `media` and `model_files` are shared by all engines; each
engine has a folder of its own. Engines of other packages are entry points of the group
`servekit.engines`.

Only `worker` and `plugin` may import from here.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

import structlog

from servekit.engines.api.load_phases import phase
from servekit.errors import LoadError

if TYPE_CHECKING:
    from servekit.engines.api.base import Engine, Report
    from servekit.protocol.messages import WorkerSpec

if not structlog.is_configured():
    # A program that imports an engine, and configures no logging, keeps its stdout for itself.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))

#: Registry name to "module:class"; imported only in the worker that runs it.
ENGINES = {
    "command": "servekit.engines.command.engine:CommandEngine",
    "echo": "servekit.engines.echo.engine:EchoEngine",
    "faster_whisper": "servekit.engines.faster_whisper.engine:FasterWhisperEngine",
    "llamacpp": "servekit.engines.llamacpp.engine:LlamaCppEngine",
    "openai": "servekit.engines.remote.engine:OpenAIEngine",
    "transformers": "servekit.engines.transformers.engine:TransformersEngine",
    "vllm": "servekit.engines.vllm.engine:VllmEngine",
}

#: Engines with several classes: functions that choose one for a specification.
CHOICES = {"vllm": "servekit.engines.vllm.library:choose_class"}

#: Slow imports of each engine, in import order; each one is reported as a phase of its own.
LIBRARIES = {
    "faster_whisper": ("ctranslate2", "faster_whisper"),
    "transformers": ("torch", "transformers"),
    "vllm": ("torch", "transformers", "vllm", "vllm.v1.engine.core_client"),
}

#: Engines whose files `source` fetches, and whether they load a converted GGUF file.
FETCHES = {"transformers": True, "vllm": True, "llamacpp": False, "faster_whisper": True}

#: Engine classes with a process below the worker's that imports the same libraries, as module:
#: `start_host` starts it beside the worker's imports, `fork_host` forks it in a forked worker.
HOSTS = {"servekit.engines.vllm.engine:VllmEngine": "servekit.engines.vllm.core.core_host"}

#: Entry point group of engines of other packages, with values "module:class" as above.
GROUP = "servekit.engines"


def create_engine(spec: WorkerSpec) -> Engine:
    """Create the engine named `spec.engine`. Raises LoadError if there is none of that name."""
    target, libraries = _choose_class(spec)
    if target in HOSTS:
        import_module(HOSTS[target]).start_host()
    return _import_class(spec, target, libraries)(spec)


def fetch_ahead(spec: WorkerSpec, report: Report) -> None:
    """Start fetching the model's files, so that `create_engine` can import the engine meanwhile."""
    if (converts := FETCHES.get(spec.engine)) is not None:
        from servekit.engines.model_files import prefetch

        prefetch.begin_fetch(spec, report, converts=converts)


def prepare_engine(spec: WorkerSpec) -> None:
    """Do the slow part of loading that touches no device, in a process that will fork.

    Raises LoadError.
    """
    _import_class(spec, *_choose_class(spec)).prepare(spec)


def take_over_fork() -> None:
    """Make a fork of a prepared process a worker's. Raises LoadError, OSError."""
    reinitialize_libraries()
    for host in HOSTS.values():
        if (prepared := sys.modules.get(host)) is not None:
            prepared.fork_host()


def reinitialize_libraries() -> None:
    """Reinitialise the libraries after a fork. Raises LoadError if CUDA is already initialised."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        raise LoadError(
            "a library has initialised CUDA on import, and CUDA cannot be used after a fork"
        )
    torch.seed()  # otherwise all forks draw the same numbers
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _choose_class(spec: WorkerSpec) -> tuple[str, Sequence[str]]:
    """Return an engine's class as "module:class", "" for another package's, and its slow imports.

    Raises LoadError.
    """
    if (choice := CHOICES.get(spec.engine)) is not None:
        found: tuple[str, Sequence[str]] = _import_object(choice)(spec)
        return found
    return ENGINES.get(spec.engine, ""), LIBRARIES.get(spec.engine, ())


def _import_class(spec: WorkerSpec, target: str, libraries: Sequence[str]) -> type[Engine]:
    if not target:
        return _load_plugin(spec.engine)
    with _no_collections():
        for library in libraries:
            with phase(library):
                import_module(library)
        with phase("engine"):
            kind: type[Engine] = _import_object(target)
    return kind


def _import_object(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _load_plugin(name: str) -> type[Engine]:
    """Return the engine class of another package; the supervisor has checked that it exists."""
    from servekit.engines.api.base import Engine

    entry = next(iter(metadata.entry_points(group=GROUP, name=name)), None)
    if entry is None:
        raise LoadError(f"there is no engine {name!r}; known: {', '.join(sorted(ENGINES))}")
    try:
        with _no_collections():
            kind = entry.load()
    except Exception as error:  # the code is not ours
        what = f"{type(error).__name__}: {error}"
        raise LoadError(
            f"the engine {name!r} ({entry.value}) cannot be imported: {what}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Engine)):
        raise LoadError(f"the engine {name!r} ({entry.value}) is not a subclass of Engine")
    return kind


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Pause garbage collection during an import.

    An import creates many objects and hardly any garbage; collections would take a third of its
    time. The imported objects are frozen afterwards, so that no later collection scans them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
