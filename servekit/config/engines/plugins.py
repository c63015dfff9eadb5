"""Engine plugins of other packages, found by their entry points.

    [project.entry-points."servekit.engines"]
    acme = "acme_engine:AcmeEngine"          a subclass of servekit.engines.api.base.Engine

    [project.entry-points."servekit.engine_kinds"]
    acme = "acme_kind:KIND"                  a servekit.config.engines.options.EngineKind; optional

Only workers import the engine itself; this module reads its name from the package's metadata. The
supervisor and the command line import the kind, so its module must not import torch. An engine
without a kind checks its options and its `path` itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ConfigDict

from servekit.config.base_model import Section
from servekit.config.engines.options import KINDS, EngineKind

ENGINES = "servekit.engines"
ENGINE_KINDS = "servekit.engine_kinds"


class AnyOptions(Section):
    """Options of an engine that does not say which it has: it checks them itself."""

    model_config = ConfigDict(extra="allow")


#: The kind of a plugin that declares none: the minimum.
UNTOLD = EngineKind(AnyOptions, frozenset({"folder", "gguf", "nothing"}))
_told: dict[str, EngineKind] = {}


@dataclass(frozen=True, slots=True)
class Plugin:
    """An engine of another package."""

    name: str
    target: str  # "module:class"
    package: str
    version: str
    kind: str = ""  # "module:attribute"; "": it declares none

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@cache
def find_plugins() -> tuple[Plugin, ...]:
    """Return all installed plugins by name; names may repeat, or equal a built-in engine's."""
    from importlib import metadata  # a slow import

    entries = metadata.entry_points()  # reads the files of all packages
    kinds = {(e.name, _package(e)): e.value for e in entries.select(group=ENGINE_KINDS)}
    found = {
        Plugin(e.name, e.value, *_package(e), kinds.get((e.name, _package(e)), ""))
        for e in entries.select(group=ENGINES)
    }
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.package)))


def _package(entry: object) -> tuple[str, str]:
    dist = getattr(entry, "dist", None)
    return ("?", "?") if dist is None else (dist.name, dist.version)


def look_again() -> None:
    """Clear the caches, since packages may have been installed or removed."""
    importlib.invalidate_caches()
    find_plugins.cache_clear()
    _described.cache_clear()


def engine_names() -> list[str]:
    """Return the valid engine names of the file: built-in engines and plugins."""
    return list(dict.fromkeys([*KINDS, *(plugin.name for plugin in usable_plugins())]))


def usable_plugins() -> Iterator[Plugin]:
    """Yield the plugins whose names are unique."""
    return (plugin for plugin in find_plugins() if not refusal_of(plugin.name))


def refusal_of(name: str) -> str:
    """Explain why no plugin of that name can be used; "" if one can, or none exists."""
    theirs = [plugin for plugin in find_plugins() if plugin.name == name]
    if theirs and name in {*KINDS, "auto"}:
        return (
            f"{theirs[0]} brings an engine that is named {name!r} as servekit's own is: it is not "
            "run; uninstall it, or give its entry point another name"
        )
    if len(theirs) > 1:
        both = " and ".join(map(str, theirs))
        return f"two packages bring an engine {name!r}, {both}: uninstall one of them"
    return ""


def find_plugin(name: str) -> Plugin | None:
    """Return the plugin of that name; None if there is none, or the name cannot be used."""
    return next((plugin for plugin in usable_plugins() if plugin.name == name), None)


def import_plugin_kind(name: str) -> EngineKind:
    """Import the current kind of a plugin.

    Raises KeyError for an unknown plugin, ValueError with a sentence for an unusable kind.
    """
    found = find_plugin(name)
    if found is None:
        raise KeyError(name)
    kind = _described(found) if found.kind else UNTOLD
    if isinstance(kind, ValueError):
        raise kind
    _told[name] = kind
    return kind


def last_told(name: str) -> EngineKind:
    """Return the kind as last imported: running workers do not depend on changes of the package."""
    return _told[name] if name in _told else import_plugin_kind(name)


def options_of(name: str) -> type[Section] | None:
    """Return the options of an engine or plugin; None if no such engine can be used."""
    try:
        return (KINDS[name] if name in KINDS else import_plugin_kind(name)).options
    except (KeyError, ValueError):
        return None


def written_options(data: Any) -> Iterator[tuple[int, dict[str, Any], type[Section]]]:
    """Yield number, keys and schema of the options of each model whose engine is known.

    `data` is that of a file which may have errors.
    """
    models = data.get("models") if isinstance(data, dict) else None
    for number, model in enumerate(models if isinstance(models, list) else []):
        engine = model.get("engine", "transformers") if isinstance(model, dict) else None
        schema = options_of(engine) if isinstance(engine, str) else None
        if schema is not None:
            yield number, model, schema


@cache
def _described(plugin: Plugin) -> EngineKind | ValueError:
    """Import the kind of a plugin; return the error for an unusable one.

    The error is kept, too: torch, once imported, cannot be blamed on the plugin a second time.
    """
    module, _, attribute = plugin.kind.partition(":")
    had_torch = "torch" in sys.modules
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # third-party code
        what = f"{type(error).__name__}: {error}"
        return ValueError(f"{_blame(plugin)} cannot be imported: {what}")
    if not isinstance(kind, EngineKind) or not issubclass(kind.options, Section):
        return ValueError(f"{_blame(plugin)} is no EngineKind whose options are a Section")
    if "torch" in sys.modules and not had_torch:
        return ValueError(f"{_blame(plugin)} imports torch; only the engine itself may")
    return kind


def _blame(plugin: Plugin) -> str:
    return f"{plugin.kind}, with which {plugin} describes its engine {plugin.name!r},"
