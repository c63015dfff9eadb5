"""Shared memory that killed processes leave in /dev/shm.

Segments outlive their makers, so workers that die often would fill the machine's memory. The
segments that a worker has mapped are recorded while it lives; after its death, those that no living
process maps are removed.

Source: shm_overview(7); proc(5), /proc/PID/maps.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from servekit.system import procfs

DIRECTORY = Path("/dev/shm")
#: File in the run directory: segments mapped by the living workers.
SEGMENTS = "shared_memory.json"


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment; `inode` distinguishes it from a later one with the same name."""

    name: str
    inode: int


def changed_at() -> int:
    """Return when a segment was last created or removed by any process, in ns; 0 if unknown."""
    with contextlib.suppress(OSError):
        return DIRECTORY.stat().st_mtime_ns
    return 0


def present_segments() -> frozenset[Segment]:
    """Return the segments of all processes; none if they cannot be listed."""
    with contextlib.suppress(OSError), os.scandir(DIRECTORY) as entries:
        return frozenset(Segment(entry.name, entry.inode()) for entry in entries)
    return frozenset()


def mapped_segments(pids: Iterable[int]) -> set[Segment]:
    """Return the segments that these processes have mapped, except unlinked ones."""
    return {segment for pid in pids for segment in _mapped_by(pid)}


def named_after(pids: Collection[int]) -> set[Segment]:
    """Return this user's segments with one of the PIDs in their names, such as torch's.

    A segment that was created just before the death has not been recorded.
    """
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(DIRECTORY):
            words = re.split(r"[^0-9A-Za-z]", entry.name)
            if any(word.isdecimal() and int(word) in pids for word in words):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found.add(Segment(entry.name, entry.inode()))
    return found


def remove_segments(segments: Collection[Segment]) -> int:
    """Remove the segments that no living process maps; return how many were removed."""
    left = [segment for segment in segments if _inode_of(segment.name) == segment.inode]
    if not left:
        return 0
    in_use = mapped_segments(process.pid for process in procfs.all_processes())
    removed = 0
    for segment in left:
        if segment not in in_use:
            with contextlib.suppress(OSError):
                (DIRECTORY / segment.name).unlink()
                removed += 1
    return removed


def record_segments(run_dir: Path, segments: Iterable[Segment]) -> None:
    """Record the segments to remove once their makers are gone. Raises OSError."""
    fresh = run_dir / f"{SEGMENTS}.new"
    fresh.write_text(json.dumps([asdict(segment) for segment in segments]))
    fresh.replace(run_dir / SEGMENTS)


def recorded_segments(run_dir: Path) -> set[Segment]:
    """Return the segments that were last recorded in a run directory."""
    try:
        return {Segment(**entry) for entry in json.loads((run_dir / SEGMENTS).read_text())}
    except (OSError, ValueError, TypeError):
        return set()


def sweep_segments(run_dir: Path, pids: Collection[int]) -> None:
    """Remove the segments of an instance's dead processes, recorded or named after their PIDs."""
    remove_segments(recorded_segments(run_dir) | named_after(pids))


def _mapped_by(pid: int) -> Iterable[Segment]:
    start = os.fsencode(f"{DIRECTORY}/")
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return
    for line in maps.split(b"\n") if start in maps else ():
        # address, permissions, offset, device, inode, path
        if start in line and not line.endswith(b" (deleted)"):
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(start):
                yield Segment(os.fsdecode(fields[5].removeprefix(start)), int(fields[4]))


def _inode_of(name: str) -> int | None:
    with contextlib.suppress(OSError):
        return (DIRECTORY / name).lstat().st_ino
    return None
