"""Digests of a model's files, by which two workers can tell whether they loaded the same model.

A path is only a name: the folder may be rewritten, the hub branch may move. The digest covers the
current content. A model of the hub is identified by its commit; a wheel by the version in its name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from servekit.errors import LoadError

log: Any = structlog.get_logger(__name__)

#: Most files of a folder that are digested; a model has a few dozen.
_MOST_FILES = 4096
#: Larger files are sampled: `_SAMPLES` samples of `_SAMPLE_BYTES` bytes each.
_WHOLE_BYTES = 2**20
_SAMPLES = 512
_SAMPLE_BYTES = 4096
#: Hexadecimal digits of a digest.
_DIGITS = 16


def identify_files(
    path: str,
    revision: str | None,
    *,
    portable: bool = False,
    trust_remote_code: bool = False,
    adapter: bool = False,
) -> str:
    """Return a digest of the files of a model or `adapter`; "" if its name identifies it already.

    With `portable` the digest is comparable across machines, by samples of the content; otherwise
    it covers size and modification time. Never raises.
    """
    if not path:  # an engine without files
        return ""
    try:
        local = Path(path).expanduser()
        if local.exists():
            return _digest_files(local, portable)
        return _find_commit(path, revision, trust_remote_code, adapter)
    except (OSError, LoadError) as error:
        log.warning("model_files_unidentified", path=str(path), reason=str(error))
        return ""


def _find_commit(path: str, revision: str | None, trust_remote_code: bool, adapter: bool) -> str:
    """Return the commit that a hub id was resolved to; "" for other sources."""
    from servekit.engines.model_files import hub, source

    found = source.parse_source(path)
    if not isinstance(found, source.Hub):
        return ""
    for code in {trust_remote_code, False}:  # a .gguf file is fetched without code
        if pin := hub.find_pin(found.repo, found.file, revision, code, adapter=adapter):
            return pin.commit
    return ""


def _digest_files(path: Path, portable: bool) -> str:
    digest = hashlib.sha256()
    for name, file in _list_files(path):
        status = file.stat()
        digest.update(f"{name}\0{status.st_size}\0".encode(errors="surrogateescape"))
        if not portable:
            digest.update(f"{status.st_mtime_ns}\0".encode())
            continue
        for sample in _read_samples(file, status.st_size):
            digest.update(sample)
    return digest.hexdigest()[:_DIGITS]


def _list_files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files in order of their names, without hidden ones."""
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


def _read_samples(file: Path, size: int) -> Iterator[bytes]:
    """Yield the whole of a small file, or enough samples of a large one to identify its weights."""
    with file.open("rb", buffering=0) as data:
        if size <= _WHOLE_BYTES:
            yield data.read(_WHOLE_BYTES)
            return
        for at in range(_SAMPLES):
            data.seek((size - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
            yield data.read(_SAMPLE_BYTES)
