"""A lock between worker processes, with progress; the kernel frees it when its owner dies.

The owner's progress is also written to a small file beside the lock, so that the waiting workers
report the same progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog

from servekit.engines.api import load_phases
from servekit.engines.api.base import Report
from servekit.protocol.messages import Progress

log: Any = structlog.get_logger(__name__)

POLL_S = 0.1
_SHARE_EVERY_S = 0.2


@contextlib.contextmanager
def hold_lock(path: Path, report: Report, *, phase: str) -> Iterator[Report]:
    """Hold the lock file `path`; waits while another process holds it.

    Yields a `report` that also shares progress with waiting processes. Raises OSError if the file
    cannot be opened.
    """
    descriptor = _open_lock(path)
    shared = path.with_suffix(".progress")
    try:
        if not take_lock(descriptor):
            log.info("model_files_awaited", entry=path.stem)
            with load_phases.phase("lock"):
                _wait_for_lock(descriptor, shared, report, phase)
        shared.unlink(missing_ok=True)  # of a dead owner
        try:
            yield _Shared(report, shared)
        finally:
            shared.unlink(missing_ok=True)
            _fresh_path(shared).unlink(missing_ok=True)
    finally:
        os.close(descriptor)  # frees the lock


def is_free(path: Path) -> bool:
    """Return whether no process, including this one, holds the lock file `path`."""
    descriptor = _open_lock(path)
    try:
        return take_lock(descriptor)
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def take_lock(descriptor: int) -> bool:
    """Try to take the lock without waiting; return whether it succeeded."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_lock(descriptor: int, shared: Path, report: Report, phase: str) -> None:
    """Poll for the lock rather than block, to report the owner's progress meanwhile."""
    last = Progress(phase)
    report(last)
    while not take_lock(descriptor):
        now = _read_progress(shared) or last
        if now != last:
            report(now)
            last = now
        time.sleep(POLL_S)


def _fresh_path(shared: Path) -> Path:
    return shared.with_suffix(".progress.new")


def _read_progress(shared: Path) -> Progress | None:
    try:
        return msgspec.json.decode(shared.read_bytes(), type=Progress)
    except (OSError, ValueError):
        return None


class _Shared:
    """A progress callback that also writes to a file, a few times a second at most."""

    def __init__(self, report: Report, path: Path) -> None:
        self._report = report
        self._path = path
        self._due = 0.0
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        self._report(progress)
        now = time.monotonic()
        if progress.phase == self._phase and now < self._due:
            return
        self._phase, self._due = progress.phase, now + _SHARE_EVERY_S
        fresh = _fresh_path(self._path)
        with contextlib.suppress(OSError):  # only for display; a full disk is noticed elsewhere
            fresh.write_bytes(msgspec.json.encode(progress))
            fresh.replace(self._path)
