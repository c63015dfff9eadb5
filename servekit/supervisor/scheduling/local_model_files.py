"""Lookup of a model's files on this machine, without fetching and without the network.

`engines.model_files` fetches them; its caches are searched by the marker files that it leaves
there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from servekit.config import paths
from servekit.model_metadata import quantizations
from servekit.system.user_dirs import find_cache_home, find_models_cache

_PYPI = re.compile(r"pypi:(?P<package>[^=]+)==(?P<version>[^/]+)(?:/(?P<member>.*))?")


def find_model_files(path: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the folder or .gguf file that `path` names, or None if it is not here yet.

    `environ` is the environment of the workers, which determines where the caches are.
    """
    try:
        known = paths.check_model_path(path, Path("/"))
    except ValueError:
        return None
    if known.kind == "local":
        return Path(known.text)
    if known.kind == "pypi":
        return _of_wheel(path, environ)
    return _of_hub(path, revision or "main", environ)


def _of_hub(path: str, revision: str, environ: Mapping[str, str]) -> Path | None:
    repo, tag = paths.split_tag(path)
    file = "/".join(repo.split("/")[2:])
    repo = "/".join(repo.split("/")[:2])
    snapshots = find_hub_cache(environ) / f"models--{repo.replace('/', '--')}" / "snapshots"
    commit = _pinned(repo, file, tag, revision, environ)
    folder = snapshots / (commit or _text(snapshots.parent / "refs" / revision) or revision)
    if tag:
        names = [str(one.relative_to(folder)) for one in folder.rglob("*.gguf")]
        if not (file := _find_tagged(names, tag)):
            return None
    found = folder / file
    return found if found.exists() else None


def _find_tagged(names: Collection[str], tag: str) -> str:
    """Return the file of a quantisation, the first of its parts; "" if it is not there, or whole.

    A cache may hold less than the repository, so that only the hub can tell why.
    """
    try:
        return quantizations.choose_files(names, tag)[0]
    except ValueError:
        return ""


def find_hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the cache folder of huggingface_hub, by the rules of its constants.py."""
    if cache := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = environ.get("HF_HOME")
    base = Path(home).expanduser() if home else find_cache_home(environ) / "huggingface"
    return base / "hub"


def _pinned(repo: str, file: str, tag: str, revision: str, environ: Mapping[str, str]) -> str:
    """Return the commit that workers have pinned for the file or quantisation, or ""."""
    for pin in (find_models_cache(environ) / ".pins").glob("*.json"):
        told = _json(pin)
        names = told.get("files") or ()
        alike = told.get("repo") == repo and told.get("revision") == revision
        holds = _find_tagged(names, tag) if tag else (file or "config.json") in names
        if alike and holds:
            return str(told.get("commit", ""))
    return ""


def wheel(path: str) -> str:
    """Return the wheel that `path` is in, as NAME==VERSION, or ""."""
    found = _PYPI.fullmatch(path)
    return "" if found is None else f"{_canonical(found['package'])}=={found['version']}"


def _canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _of_wheel(path: str, environ: Mapping[str, str]) -> Path | None:
    found = _PYPI.fullmatch(path)
    if found is None:
        return None
    wanted = [
        "pypi",
        _canonical(found["package"]),
        found["version"],
        (found["member"] or "").strip("/"),
    ]
    fetched = [entry for entry, identity in list_entries(environ) if identity[-4:] == wanted]
    for entry in fetched:
        ggufs = sorted(entry.glob("*.gguf"))
        if ggufs:
            return ggufs[0]
    return fetched[0] if fetched else None


def list_entries(environ: Mapping[str, str]) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folders in the model cache, each with the identity that it was made from."""
    for mark in find_models_cache(environ).glob("*/.servekit.json"):
        yield mark.parent, [str(part) for part in _json(mark).get("identity", ())]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
