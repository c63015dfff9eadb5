"""The cache of fetched and converted models; its entries are always complete.

    ${XDG_CACHE_HOME:-~/.cache}/servekit/models/
      NAME-DIGEST/              a finished entry; `.servekit.json` lists its files and sizes
      .partial-NAME-DIGEST.XXX/ an entry that its owner is building; renamed once it is on disk
      .locks/NAME-DIGEST.lock   held (flock) by the owner; the kernel frees it if the owner dies
      .locks/NAME-DIGEST.progress  the owner's progress, for waiting workers

A finished entry is never changed, so readers need no lock, and a read-only cache serves its
entries.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog

from servekit.engines.api.base import Report
from servekit.engines.model_files import file_lock
from servekit.errors import LoadError
from servekit.model_metadata.model_folder import damage
from servekit.system.user_dirs import find_models_cache

log: Any = structlog.get_logger(__name__)

MARKER = ".servekit.json"
_PARTIAL = ".partial-"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Build = Callable[[Path, Report], None]


@dataclass(frozen=True, slots=True)
class Key:
    """The origin of an entry: sources with the same identity have the same bytes."""

    label: str
    identity: tuple[str, ...]

    @property
    def name(self) -> str:
        digest = hashlib.sha256("\0".join(self.identity).encode()).hexdigest()[:16]
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.label).strip('-.')[:80]}-{digest}"


class Marker(msgspec.Struct, frozen=True):
    """The content of a finished entry's `.servekit.json`."""

    identity: tuple[str, ...]
    files: dict[str, int]  # path inside the entry → size in bytes


def default_root() -> Path:
    """Return the models' folder in this user's cache."""
    return find_models_cache(os.environ)


def disk_free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the file system of `folder`."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache folder. `free_bytes` is a field so that tests can simulate a full disk."""

    root: Path = field(default_factory=default_root)
    free_bytes: Callable[[Path], int] = disk_free_bytes

    def find(self, key: Key) -> Path | None:
        """Return the finished entry if it exists and is complete.

        Takes no lock and writes nothing.
        """
        entry = self.root / key.name
        return entry if _is_whole(entry) else None

    def obtain(self, key: Key, build: Build, report: Report, *, phase: str) -> Path:
        """Return the entry of `key`, built by `build(folder, report)` if it does not exist yet.

        If processes race, one builds the entry; the others wait and report its progress. Raises
        LoadError if the folder cannot be written or its disk is full; in that case nothing is left
        behind.
        """
        if found := self.find(key):
            return found
        with self.locked(key, report, phase=phase) as shared:
            if found := self.find(key):
                return found
            self._sweep_partials(key)
            return self._build_entry(key, build, shared)

    def discard(self, key: Key) -> None:
        """Remove an entry if it exists; a process that has its files open keeps them."""
        entry = self.root / key.name
        with contextlib.suppress(OSError):  # there is none, or the cache is read-only
            gone = entry.rename(self.root / f"{_PARTIAL}{key.name}.discarded")
            log.info("cache_leftover_removed", path=str(entry))
            shutil.rmtree(gone, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self, key: Key, report: Report, *, phase: str) -> Iterator[Report]:
        """Hold the lock of `key`; OSErrors inside become LoadErrors that name the folder."""
        with self._explain_errors():
            path = self._lock_of(key.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock.hold_lock(path, report, phase=phase) as shared:
                yield shared

    def require(self, needed_bytes: int, what: str) -> None:
        """Raise LoadError unless `needed_bytes` for `what` fit on the disk."""
        free = self.free_bytes(self.root)
        if free < needed_bytes:
            raise LoadError(
                f"Not enough disk for {what}: {needed_bytes} bytes are needed in {self.root} and "
                f"{free} are free. Free some, or point XDG_CACHE_HOME at a larger disk."
            )

    def full(self, error: BaseException) -> LoadError:
        """Return the error for a disk that filled up during a write."""
        return LoadError(
            f"The disk of {self.root} filled up ({error}); what was written is removed again. "
            "Free some space, or point XDG_CACHE_HOME at a larger disk."
        )

    def _lock_of(self, name: str) -> Path:
        return self.root / ".locks" / f"{name}.lock"

    def _build_entry(self, key: Key, build: Build, report: Report) -> Path:
        entry = self.root / key.name
        partial = Path(tempfile.mkdtemp(prefix=f"{_PARTIAL}{key.name}.", dir=self.root))
        try:
            build(partial, report)
            _seal_entry(partial, key)
            if entry.exists():
                log.warning("cache_entry_damaged", path=str(entry))
                entry.rename(partial.with_name(f"{partial.name}.damaged"))
            partial.chmod(0o755)  # mkdtemp's 0700 would hide it from other users of a service
            partial.rename(entry)
            _sync_path(self.root)
        finally:
            for leftover in self.root.glob(f"{partial.name}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        return entry

    def _sweep_partials(self, key: Key) -> None:
        """Remove partial folders whose owner has died: nobody else holds their locks."""
        for partial in self.root.glob(f"{_PARTIAL}*"):
            name = re.sub(r"^\.partial-(.*-[0-9a-f]{16})\..*$", r"\1", partial.name)
            if name == key.name or file_lock.is_free(self._lock_of(name)):
                log.info("cache_leftover_removed", path=str(partial))
                shutil.rmtree(partial, ignore_errors=True)

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise self.full(error) from error
            raise LoadError(
                f"The cache folder {self.root} cannot be used ({error}). "
                "Point XDG_CACHE_HOME at a folder that can be written."
            ) from error


def _is_whole(entry: Path) -> bool:
    try:
        marker = msgspec.json.decode((entry / MARKER).read_bytes(), type=Marker)
        sizes_match = all((entry / f).stat().st_size == size for f, size in marker.files.items())
    except (OSError, ValueError):  # msgspec raises UnicodeDecodeError, too
        return False
    return sizes_match and not any(damage(f) for f in entry.rglob("*.safetensors"))


def _seal_entry(folder: Path, key: Key) -> None:
    """Write the marker and sync all files to disk, so that a rename publishes them together."""
    files = {str(f.relative_to(folder)): f.stat().st_size for f in _list_files(folder)}
    (folder / MARKER).write_bytes(msgspec.json.encode(Marker(key.identity, files)))
    for path in _list_files(folder):
        path.chmod(0o644)  # safetensors writes 0600; other users of a service read the cache too
    for path in (*_list_files(folder), *(d for d in folder.rglob("*") if d.is_dir()), folder):
        _sync_path(path)


def _list_files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
