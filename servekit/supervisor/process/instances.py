"""The discovery of running instances, and the choice of the instance that a command addresses.

An instance is found in /proc, by the lock file that its supervisor holds open. That needs no shell
variable, works under sudo, cron and `docker exec`, and is never out of date.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from servekit.errors import StartError
from servekit.supervisor.process.run_dir import (
    Record,
    default_paths,
    may_read,
    no_instance_error,
    read_record,
)
from servekit.system import procfs

_DELETED = " (deleted)"
#: The longest wait for a supervisor to restore a run directory that somebody has removed.
_RESTORED_S = 2.0
_LOOK_EVERY_S = 0.1
#: The part of a command line that is read, in characters.
_LONGEST = 10_000


@dataclass(frozen=True, slots=True)
class Running:
    """A running instance."""

    run_dir: Path
    record: Record
    uid: int


def list_instances() -> list[Running]:
    """Return this user's instances; for root without instances of its own, those of all users."""
    deadline = time.monotonic() + _RESTORED_S
    while True:
        found, removed = _scan_instances()
        if not removed or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    return [one for one in found if one.uid == os.getuid()] or found


def choose_run_dir(
    given: Path | None, found: Sequence[Running], environ: Mapping[str, str]
) -> Path | None:
    """Return the run directory to use: the given one, the default, or the only running instance's.

    Returns None if no instance runs. Raises StartError if several run and none is the default.
    """
    if given is not None:
        return given
    folders = [one.run_dir for one in found]
    for path in default_paths(environ):
        if path in folders:
            return path
    if len(found) > 1:
        raise StartError(f"several instances run; --run-dir chooses:\n{listing(found)}")
    return folders[0] if folders else None


def find_run_dir(given: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the run directory of the instance that a command addresses.

    Raises StartError if no instance runs, or several do.
    """
    if given is not None:
        return given
    path = choose_run_dir(given, list_instances(), environ)
    if path is None:
        raise no_instance_error(default_paths(environ)[0])
    return path


def find_last(given: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the run directory whose files a command reads.

    As `find_run_dir`, but if no instance runs, returns the default that was used last. Raises
    StartError if several instances run, or there is no such directory.
    """
    path = given if given is not None else choose_run_dir(given, list_instances(), environ)
    if path is None:
        readable = filter(may_read, default_paths(environ))
        there = [folder for folder in readable if (folder / "lock").is_file()]
        path = max(there, key=_last_used, default=default_paths(environ)[0])
    if not may_read(path) or not path.is_dir():
        raise no_instance_error(path)
    return path


def listing(found: Sequence[Running]) -> str:
    """Return one line for each instance: how to choose it, and what it is."""
    return "\n".join(
        f"  --run-dir {shlex.quote(str(one.run_dir))}  (pid {one.record.pid}, {one.record.url}, "
        f"{one.record.config})"
        for one in sorted(found, key=lambda one: one.record.started_at)
    )


def _last_used(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.iterdir()), default=0.0)


def _scan_instances() -> tuple[list[Running], bool]:
    """Return the running instances, and whether the directory of one is missing at the moment."""
    found: dict[Path, Running] = {}
    removed = False
    for pid in procfs.all_pids():
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116  (pathlib: 4 ×)
            if uid != os.getuid() and os.getuid() != 0:
                continue
            for fd, folder in _locks(pid):
                record = read_record(folder)
                if record is not None and record.pid == pid and _is_same(fd, folder / "lock"):
                    found[folder] = Running(folder, record, uid)
                else:
                    removed |= (
                        "servekit" in procfs.command_line(pid, _LONGEST) and not folder.exists()
                    )
    return list(found.values()), removed


def _locks(pid: int) -> Iterator[tuple[str, Path]]:
    """Yield each file named `lock` that a process has open, with its folder."""
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(entry.path)  # noqa: PTH115
            target = link.removesuffix(_DELETED)
            if target.endswith("/lock"):
                yield entry.path, Path(target).parent


def _is_same(fd: str, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(fd), path.stat())  # noqa: PTH116
    return False
