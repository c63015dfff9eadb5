"""Options of engines that are paths: relative to the configuration file, as the model's `path` is.

    class AcmeOptions(Section):
        words: ConfigPath

`servekit check` reports one that does not exist, variables of the environment are filled in, and
the engine gets an absolute path. The content belongs to what `Engine.identify` tells apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field

from servekit.config.base_model import Section
from servekit.config.paths import resolve_path


class _PathMark:
    """Marks the type of an option that is a path."""


#: A file or folder among the options of an engine; a list of them is a `tuple[ConfigPath, ...]`.
ConfigPath = Annotated[str, Field(min_length=1), _PathMark()]


@cache
def path_options(options: type[Section]) -> tuple[str, ...]:
    """Return the names of the options that are paths, or lists of paths."""
    fields = options.model_fields.items()
    return tuple(name for name, field in fields if _is_path(field.annotation, field.metadata))


def _is_path(annotation: Any, metadata: list[Any]) -> bool:
    if any(isinstance(one, _PathMark) for one in metadata):
        return True
    return any(
        _is_path(one, list(getattr(one, "__metadata__", ()))) for one in get_args(annotation)
    )


def list_paths(
    options: type[Section], written: Mapping[str, Any]
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the paths in `written`, and those of the defaults, with their places."""
    for name in path_options(options):
        value = _value_of(options, written, name)
        if isinstance(value, str):
            yield (name,), value
        elif isinstance(value, list | tuple):
            yield from (((name, i), one) for i, one in enumerate(value) if isinstance(one, str))


def resolve_options(
    options: type[Section], written: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return `written` with absolute paths, those of the defaults included. Raises ValueError."""
    resolved = dict(written)
    for name in path_options(options):
        value = _value_of(options, written, name)
        if isinstance(value, str):
            resolved[name] = str(resolve_path(value, folder))
        elif isinstance(value, list | tuple):
            resolved[name] = [str(resolve_path(one, folder)) for one in value]
    return resolved


def _value_of(options: type[Section], written: Mapping[str, Any], name: str) -> Any:
    if name in written:
        return written[name]
    return options.model_fields[name].get_default(call_default_factory=True)
