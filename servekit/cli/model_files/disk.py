"""The files of models on this machine, by their source: the hub's cache and servekit's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from servekit.config import paths
from servekit.errors import StartError
from servekit.supervisor.scheduling import local_model_files
from servekit.system.user_dirs import find_models_cache


@dataclass(frozen=True, slots=True)
class Stored:
    """The files of one source, in one or more folders of caches."""

    source: str  # a hub id, or PACKAGE==VERSION, or the file that was converted
    folders: tuple[Path, ...]
    size_bytes: int


def list_stored(environ: Mapping[str, str]) -> list[Stored]:
    """Return everything in the caches that a model's `path` can name, by source."""
    folders: dict[str, list[Path]] = {}
    hub = local_model_files.find_hub_cache(environ)
    for folder in sorted(hub.glob("models--*--*")):
        if any((folder / "snapshots").glob("*/*")):
            name = folder.name.removeprefix("models--").replace("--", "/")
            folders.setdefault(name, []).append(folder)
    for folder, identity in local_model_files.list_entries(environ):
        if source := _name_source(identity):
            folders.setdefault(source, []).append(folder)
    return [
        Stored(source, tuple(found), sum(map(measure_files, found)))
        for source, found in sorted(folders.items())
    ]


def _name_source(identity: list[str]) -> str:
    """Return the source of a cache entry; `identity` is as `engines.model_files` makes it."""
    if "pypi" in identity[:2]:
        package, version = identity[identity.index("pypi") + 1 :][:2]
        return f"{package}=={version}"
    if "hub" in identity[:2]:
        return identity[identity.index("hub") + 1]
    return next((part for part in identity if part.startswith("/")), "")


def source_of(path: str) -> str:
    """Return the source that a model's `path` is stored under."""
    if wheel := local_model_files.wheel(path):
        return wheel
    return "/".join(paths.split_tag(path)[0].split("/")[:2]) if path[:1] != "/" else path


def size_of(path: str, stored: list[Stored]) -> int | None:
    """Return the bytes on disk of a model's files; None if they are not here."""
    found = next((one for one in stored if one.source == source_of(path)), None)
    if found is not None:
        return found.size_bytes
    local = Path(path)
    return measure_files(local) if local.is_absolute() and local.exists() else None


def measure_files(path: Path) -> int:
    """Return the bytes of the files in a folder, each once: the hub's snapshots are links."""
    if path.is_file():
        return path.stat().st_size
    return sum(one.stat().st_size for one in _files(path))


def _files(folder: Path) -> Iterator[Path]:
    return (one for one in folder.rglob("*") if one.is_file() and not one.is_symlink())


def remove_files(stored: Stored, environ: Mapping[str, str]) -> None:
    """Remove the files, and the commits that were pinned for them. Raises StartError."""
    try:
        for folder in stored.folders:
            shutil.rmtree(folder)
    except OSError as error:
        raise StartError(f"cannot remove {error.filename}: {error.strerror}") from None
    for pin in (find_models_cache(environ) / ".pins").glob("*.json"):
        if _pinned_repo(pin) == stored.source:
            pin.unlink(missing_ok=True)


def _pinned_repo(pin: Path) -> str:
    try:
        return str(json.loads(pin.read_bytes()).get("repo"))
    except (OSError, ValueError, AttributeError):
        return ""
