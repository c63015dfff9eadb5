"""Which files a model's path stands for, so that two workers can tell whether theirs are the same.

A path is a name: the folder behind it may be written anew, the branch of a hub pushed to. A digest
of what is there now tells both apart. A model of the hub is its commit; a wheel's version is in its
name already.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from servekit.errors import LoadError

log = logging.getLogger(__name__)

#: Files of a folder that are looked at; a model has a few dozen.
_MOST_FILES = 4096
#: Of a file of more bytes than this, samples are read: so many, of so many bytes each.
_WHOLE_BYTES = 2**20
_SAMPLES = 512
_SAMPLE_BYTES = 4096
#: Hexadecimal digits of a digest.
_DIGITS = 16


def identify(
    path: str,
    revision: str | None,
    *,
    portable: bool = False,
    trust_remote_code: bool = False,
    adapter: bool = False,
) -> str:
    """A digest of the files of a model, or of an `adapter`; "" where its name says all.

    `portable` compares across machines, by samples of the content; else files are compared by size
    and time of change. Never raises.
    """
    try:
        local = Path(path).expanduser()
        if local.exists():
            return _digest(local, portable)
        return _commit(path, revision, trust_remote_code, adapter)
    except (OSError, LoadError) as error:
        log.warning("cannot tell which files %s are: %s", path, error)
        return ""


def _commit(path: str, revision: str | None, trust_remote_code: bool, adapter: bool) -> str:
    """What a hub id was resolved to; "" for what is none."""
    from servekit.engines.model_files import hub, source

    found = source.parse(path)
    if not isinstance(found, source.Hub):
        return ""
    for code in {trust_remote_code, False}:  # a .gguf file is fetched without any code
        if pin := hub.pinned(found.repo, found.file, revision, code, adapter=adapter):
            return pin.commit
    return ""


def _digest(path: Path, portable: bool) -> str:
    digest = hashlib.sha256()
    for name, file in _files(path):
        status = file.stat()
        digest.update(f"{name}\0{status.st_size}\0".encode(errors="surrogateescape"))
        if not portable:
            digest.update(f"{status.st_mtime_ns}\0".encode())
            continue
        for sample in _samples(file, status.st_size):
            digest.update(sample)
    return digest.hexdigest()[:_DIGITS]


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """By their names, hidden ones left out."""
    if path.is_file():
        yield path.name, path
        return
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
        if len(found) > _MOST_FILES:
            break
    yield from sorted((str(file.relative_to(path)), file) for file in found[:_MOST_FILES])


def _samples(file: Path, size: int) -> Iterator[bytes]:
    """All of a small file; of a large one so much that no other weights have it, too."""
    with file.open("rb", buffering=0) as data:
        if size <= _WHOLE_BYTES:
            yield data.read(_WHOLE_BYTES)
            return
        for at in range(_SAMPLES):
            data.seek((size - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
            yield data.read(_SAMPLE_BYTES)
