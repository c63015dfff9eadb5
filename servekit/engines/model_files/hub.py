"""Models from the Hugging Face hub: only the files needed for serving, pinned to a commit.

The first worker that resolves an id records the commit (a pin), so that all replicas and restarts
serve the same weights, whatever is pushed meanwhile. If the pinned files are in the hub's cache, no
request is made at all. A pin is dropped by deleting its file, whose name is logged.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import structlog

from servekit.engines.api.base import Report
from servekit.engines.api.load_phases import phase
from servekit.engines.model_files.cache import Cache, Key, disk_free_bytes
from servekit.errors import LoadError
from servekit.model_metadata import ctranslate2, model_folder, quantizations
from servekit.protocol.messages import Progress

log: Any = structlog.get_logger(__name__)

_POLL_S = 0.2
#: Endings of the files with weights.
_WEIGHTS = (".safetensors", ".gguf", ctranslate2.FILE)
_UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EPERM}
_TEXT = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    "video_preprocessor_config.json",  # the processors of many models do not load without it
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "vocabulary.*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template.*", "additional_chat_templates/*"),
    # of an embedding model: the modules after its transformer
    *("modules.json", "sentence_*_config.json", "[0-9]*_*/config.json"),
    "config_sentence_transformers.json",
    "[0-9]*_*/model.safetensors",
)


class Pin(msgspec.Struct, frozen=True):
    """The commit and files that an id and revision were first resolved to."""

    repo: str
    revision: str
    commit: str
    files: tuple[str, ...]  # of one GGUF model: it, or all its parts in order
    sizes: dict[str, int] = {}  # bytes of those with weights, as the hub has stated them

    @property
    def folder(self) -> Path:
        """The local folder of the files."""
        return _repo_cache(self.repo) / "snapshots" / self.commit


def fetch_repo(
    repo: str,
    file: str,
    revision: str | None,
    report: Report,
    *,
    cache: Cache,
    trust_remote_code: bool = False,
    adapter: bool = False,
) -> Pin:
    """Fetch a model's files and return their pin.

    With `file` only a GGUF model is fetched: the file of that name, or of a quantisation (":TAG").
    With `adapter`, the files of an adapter. Raises LoadError: permanent if the hub refuses or has
    no such model, not permanent if it cannot be reached and its cache does not hold the model
    either.
    """
    wanted = revision or "main"
    key, path = _locate_pin(repo, file, revision, trust_remote_code, adapter, cache)
    pin = _read_pin(path)
    if pin is None or not _is_here(pin):
        with cache.locked(key, report, phase="fetch") as shared:
            pin = _read_pin(path)
            if pin is None or not _is_here(pin):
                kind = _AdapterHub if adapter else _Hub
                with phase("fetch"):
                    pin = kind(repo, file, trust_remote_code, shared).download(wanted, pin)
                _write_pin(path, pin)
    _announce_pin(pin, path)
    return pin


def list_wanted(
    repo: str, file: str, revision: str | None, timeout_s: float
) -> tuple[dict[str, int], list[str], str]:
    """Return the sizes of all files of a repository, in bytes, those to serve, and the commit.

    `file` is as in `fetch_repo`. Raises LoadError, not permanent if the hub does not answer.
    """
    from huggingface_hub import HfApi

    wanted = revision or "main"
    try:
        info = HfApi().model_info(repo, revision=wanted, files_metadata=True, timeout=timeout_s)
    except Exception as error:
        refusal = _explain_refusal(error, repo, wanted)
        message = f"The hub cannot be reached for {repo} at {wanted}: {_find_cause(error)}"
        raise refusal or LoadError(message, permanent=False) from error
    sizes = _list_sizes(info)
    files = _Hub(repo, file, False, lambda _: None).select_files(list(sizes))
    return sizes, files, str(info.sha)


def find_pin(
    repo: str,
    file: str,
    revision: str | None,
    trust_remote_code: bool = False,
    *,
    adapter: bool = False,
    cache: Cache | None = None,
) -> Pin | None:
    """Return the pin that `fetch_repo` recorded for the same arguments; None if there is none."""
    return _read_pin(
        _locate_pin(repo, file, revision, trust_remote_code, adapter, cache or Cache())[1]
    )


def _locate_pin(
    repo: str, file: str, revision: str | None, code: bool, adapter: bool, cache: Cache
) -> tuple[Key, Path]:
    """Return the key to lock for resolving a name, and the path of its pin."""
    kept_as = "adapter" if adapter else "hub"
    key = Key(f"{repo} {file}", (kept_as, repo, file, revision or "main", str(code)))
    return key, cache.root / ".pins" / f"{key.name}.json"


def import_library() -> None:
    """Import all modules that `fetch_repo` uses."""
    from huggingface_hub import HfApi, constants, errors, file_download, snapshot_download

    assert all((HfApi, constants, errors, file_download, snapshot_download))  # lazy imports


def _announce_pin(pin: Pin, path: Path) -> None:
    if pin.commit == pin.revision:
        log.info("hub_commit_resolved", repo=pin.repo, commit=pin.commit)
        return
    log.info(
        "hub_commit_pinned",
        repo=pin.repo,
        commit=pin.commit,
        revision=pin.revision,
        file=str(path),
    )


def _read_pin(path: Path) -> Pin | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Pin)
    except (OSError, ValueError):
        return None


def _write_pin(path: Path, pin: Pin) -> None:
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(pin))
    fresh.replace(path)


def _is_here(pin: Pin) -> bool:
    """Return whether all pinned files are in the hub's cache."""
    return all(_is_whole(pin.folder / name, pin.sizes.get(name)) for name in pin.files)


def _is_whole(path: Path, size: int | None) -> bool:
    """Return whether a file is there and has its size, None if that is unknown."""
    return path.is_file() and size in (None, path.stat().st_size)


def _remove_damaged(snapshot: Path, sizes: Mapping[str, int]) -> list[str]:
    """Remove files of another size than the hub states, and return their names.

    The library fetches no file that is there, and a crash of the machine may have shortened one.
    """
    there = [name for name in sizes if (snapshot / name).is_file()]
    damaged = [name for name in there if not _is_whole(snapshot / name, sizes[name])]
    for name in damaged:
        path = snapshot / name
        log.warning("hub_file_damaged", path=str(path), size_bytes=sizes[name])
        if (blob := path.resolve()).is_relative_to(snapshot.parents[1].resolve()):
            blob.unlink()
        path.unlink(missing_ok=True)
    return damaged


def _list_sizes(info: Any) -> dict[str, int]:
    """Return the size of each file of a repository in bytes; 0: unknown."""
    siblings = {s.rfilename: s.size or 0 for s in info.siblings or ()}
    return {n: size for n, size in siblings.items() if not {"..", "/"} & {*PurePosixPath(n).parts}}


def _repo_cache(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


class _Hub:
    """A model of the hub at its current state."""

    def __init__(self, repo: str, file: str, trust_remote_code: bool, report: Report) -> None:
        self._repo = repo
        self._file = file
        self._code = trust_remote_code
        self._report = report

    def download(self, revision: str, pin: Pin | None) -> Pin:
        """Fetch the current `revision`, or the commit of `pin`, and return the pin."""
        self._report(Progress("fetch", 0, 0, "bytes"))
        try:
            return self._download_commit(revision, pin.commit if pin else revision)
        except LoadError:
            raise
        except Exception as error:
            refusal = _explain_refusal(error, self._repo, revision)
            if refusal is not None:
                raise refusal from error
            return self._find_cached(revision, pin, error)

    def _download_commit(self, revision: str, commitish: str) -> Pin:
        from huggingface_hub import HfApi, snapshot_download

        info = HfApi().model_info(self._repo, revision=commitish, files_metadata=True)
        sizes = _list_sizes(info)
        names = self.select_files(list(sizes))
        # Only of weights: people edit templates and configurations in the hub's cache.
        stated = {n: sizes[n] for n in names if sizes[n] and n.endswith(_WEIGHTS)}
        snapshot = _repo_cache(self._repo) / "snapshots" / str(info.sha)
        _remove_damaged(snapshot, stated)
        missing = sum(sizes[n] for n in names if not (snapshot / n).is_file())
        _require_disk(missing, self._repo)
        with self._report_progress(missing):
            # Fetched by name, not by commit, so that the hub's cache also records the name's
            # commit.
            fetched = snapshot_download(self._repo, revision=commitish, allow_patterns=names)
        if Path(fetched).name != info.sha:  # pushed to in between
            return self._download_commit(revision, Path(fetched).name)
        if damaged := _remove_damaged(snapshot, stated):
            what = f"{damaged[0]} with {stated[damaged[0]]} bytes, and sent another number"
            raise LoadError(f"The hub lists {self._repo}'s {what}.", permanent=False)
        return Pin(self._repo, revision, str(info.sha), tuple(names), stated)

    def select_files(self, names: list[str]) -> list[str]:
        """Return the files needed for serving. Raises LoadError if the weights are missing."""
        if self._file:
            return choose_gguf(self._repo, self._file, names)
        weights = [n for n in names if fnmatch.fnmatch(n, "*.safetensors") and "/" not in n]
        if not weights and ctranslate2.FILE in names:
            weights = [ctranslate2.FILE]
        if not weights:
            raise LoadError(_explain_no_weights(self._repo, names))
        if "config.json" not in names:
            raise LoadError(f"The hub's {self._repo} has no config.json, so it is no whole model.")
        # Some models have the same weights in addition under a name other than model*.safetensors.
        weights = [n for n in weights if n.startswith("model")] or weights
        texts = [n for n in names if any(_matches_pattern(n, p) for p in self._file_patterns())]
        return sorted({*weights, *texts})

    def _check_snapshot(self, snapshot: Path) -> None:
        if not self._file and not ctranslate2.is_model(snapshot):
            model_folder.check(snapshot)

    def _file_patterns(self) -> list[str]:
        return [*_TEXT, "*.safetensors.index.json", *(["*.py"] if self._code else [])]

    def _find_cached(self, revision: str, pin: Pin | None, error: Exception) -> Pin:
        """Return a pin of `revision` in the hub's cache, if the hub itself cannot be reached."""
        from huggingface_hub import constants

        commit = pin.commit if pin else _cached_commit(self._repo, revision)
        sizes = pin.sizes if pin else {}
        snapshot = _repo_cache(self._repo) / "snapshots" / (commit or "none")
        names = [str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if p.is_file()]
        names = [n for n in names if _is_whole(snapshot / n, sizes.get(n))]
        try:
            files = self.select_files(names)
            self._check_snapshot(snapshot)
        except (LoadError, OSError):
            message = _explain_unreachable(self._repo, revision, error)
            if self._file and (cached := quantizations.list_labels(names)):
                message += f" Its cached quantisations: {', '.join(cached)}."
            raise LoadError(message, permanent=False) from error
        if not constants.HF_HUB_OFFLINE:
            log.warning("hub_unreachable", repo=self._repo, reason=_find_cause(error))
        return Pin(self._repo, revision, commit or "", tuple(files), sizes)

    @contextlib.contextmanager
    def _report_progress(self, total: int) -> Iterator[None]:
        """Report the growth of the hub's cache, which works with every version and protocol."""
        blobs = _repo_cache(self._repo) / "blobs"
        before, ended = _held_bytes(blobs), threading.Event()

        def poll() -> None:
            while not ended.wait(_POLL_S):
                done = max(0, min(total, _held_bytes(blobs) - before))
                self._report(Progress("fetch", done, total, "bytes"))

        thread = threading.Thread(target=poll, name="hub-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _AdapterHub(_Hub):
    """An adapter of the hub, in PEFT's safetensors format."""

    def select_files(self, names: list[str]) -> list[str]:
        if "adapter_config.json" not in names:
            raise LoadError(f"The hub's {self._repo} has no adapter_config.json: it is no adapter.")
        if "adapter_model.safetensors" not in names:
            raise LoadError(model_folder.no_weights(f"The hub's {self._repo}", names))
        return ["adapter_config.json", "adapter_model.safetensors"]

    def _check_snapshot(self, snapshot: Path) -> None:
        """Do nothing: `select_files` has found both files."""


def choose_gguf(repo: str, file: str, names: list[str]) -> list[str]:
    """Return the files of the GGUF model that `file` is, or with ":TAG" has; see `fetch_repo`.

    Raises LoadError with a sentence that lists what the repository has.
    """
    try:
        if file.startswith(":"):
            return quantizations.choose_files(names, file[1:])
        if found := quantizations.list_parts(names, file):
            return found
    except ValueError as error:
        raise LoadError(f"{repo} {error}.") from None
    ggufs = ", ".join(n for n in names if n.endswith(".gguf")) or "none"
    raise LoadError(f"{repo} has no {file}; its GGUF files: {ggufs}.")


def _explain_no_weights(repo: str, names: list[str]) -> str:
    """Return the error text for a model without safetensors."""
    labels = quantizations.list_labels(names)
    if not labels:
        return model_folder.no_weights(f"The hub's {repo}", names)
    return (
        f"The hub's {repo} holds GGUF files; write one of its quantisations after a colon, such as "
        f"{repo}:{labels[0]}; there are: {', '.join(labels)}."
    )


def _matches_pattern(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch.fnmatch(name, pattern)


def _held_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _require_disk(needed_bytes: int, repo: str) -> None:
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    root.mkdir(parents=True, exist_ok=True)
    free = disk_free_bytes(root)
    if free < needed_bytes:
        raise LoadError(
            f"Not enough disk for {repo}: {needed_bytes} bytes are needed in {root} and {free} are "
            "free. Free some, or point HF_HOME at a larger disk."
        )


def _cached_commit(repo: str, revision: str) -> str | None:
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    with contextlib.suppress(OSError):
        return (_repo_cache(repo) / "refs" / revision).read_text().strip()
    return None


def _explain_unreachable(repo: str, revision: str, error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        where = constants.HF_HUB_CACHE
        return f"HF_HUB_OFFLINE is set and {repo} at {revision} is not whole in {where}."
    reason = _find_cause(error)
    return f"The hub cannot be reached for {repo} at {revision}, which is not cached: {reason}"


def _find_cause(error: BaseException) -> str:
    """Return the first line of what the hub or the network has said.

    The library wraps it in an error that advises to check the connection.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0] or type(error).__name__


def _explain_refusal(error: Exception, repo: str, revision: str) -> LoadError | None:
    """Return the error for a refusal by the hub or the disk; None for other errors."""
    from huggingface_hub import constants, errors

    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        return LoadError(
            f"The hub's cache {constants.HF_HUB_CACHE} cannot be written ({error}). "
            "Free some disk, or point HF_HOME at a folder with room that can be written."
        )
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        return LoadError(
            f"{repo} is gated: accept its terms on the hub, and set HF_TOKEN to a token that may "
            "read it."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return LoadError(f"The hub's {repo} has no revision {revision}.")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403, 404):
        return LoadError(
            f"The hub has no model {repo}, or it is private and HF_TOKEN may not read it."
        )
    if isinstance(error, errors.HFValidationError):
        return LoadError(f"{repo!r} is no hub id: {error}")
    return None
