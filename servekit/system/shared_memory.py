"""Shared memory that processes leave in /dev/shm when they are killed.

It outlives its makers: a worker that dies a thousand times would fill the machine's memory with
segments that nobody can name any more. What a worker has mapped is noted while it lives; after
its death those of its segments go that no living process maps.

Source: shm_overview(7); proc(5), /proc/PID/maps.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from servekit.system import procfs

DIRECTORY = Path("/dev/shm")
#: In the run directory: what the living workers have mapped.
SEGMENTS = "shared_memory.json"


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment. `inode` tells it from another that got its name later."""

    name: str
    inode: int


def changed_at() -> int:
    """When a segment was last made or removed by anybody, in ns; 0 where there are none at all."""
    with contextlib.suppress(OSError):
        return DIRECTORY.stat().st_mtime_ns
    return 0


def mapped(pids: Iterable[int]) -> set[Segment]:
    """What these processes have mapped, as far as it still has a name."""
    return {segment for pid in pids for segment in _mapped_by(pid)}


def named_after(pids: Collection[int]) -> set[Segment]:
    """Segments of our user with a maker's PID in their names, as torch gives them.

    One that was made just before the death has not been noted.
    """
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(DIRECTORY):
            maker = entry.name.removeprefix("torch_").split("_")[0]
            if entry.name.startswith("torch_") and maker.isdecimal() and int(maker) in pids:
                with contextlib.suppress(OSError):
                    found.add(Segment(entry.name, entry.inode()))
    return found


def remove(segments: Collection[Segment]) -> int:
    """Remove those that are still there and that no living process maps; how many that were."""
    left = [segment for segment in segments if _inode(segment.name) == segment.inode]
    if not left:
        return 0
    in_use = mapped(process.pid for process in procfs.everyone())
    removed = 0
    for segment in left:
        if segment not in in_use:
            with contextlib.suppress(OSError):
                (DIRECTORY / segment.name).unlink()
                removed += 1
    return removed


def note(run_dir: Path, segments: Iterable[Segment]) -> None:
    """Write down what is to be removed once its makers are gone. Raises OSError."""
    fresh = run_dir / f"{SEGMENTS}.new"
    fresh.write_text(json.dumps([asdict(segment) for segment in segments]))
    fresh.replace(run_dir / SEGMENTS)


def read(run_dir: Path) -> set[Segment]:
    """What was last noted in a run directory."""
    try:
        return {Segment(**entry) for entry in json.loads((run_dir / SEGMENTS).read_text())}
    except (OSError, ValueError, TypeError):
        return set()


def _mapped_by(pid: int) -> Iterable[Segment]:
    start = f"{DIRECTORY}/"
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        # address, permissions, offset, device, inode, path
        if start in line and not line.endswith(" (deleted)"):
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(start):
                yield Segment(fields[5].removeprefix(start), int(fields[4]))


def _inode(name: str) -> int | None:
    with contextlib.suppress(OSError):
        return (DIRECTORY / name).lstat().st_ino
    return None
