"""A lock between worker processes that the kernel frees when its owner dies, with progress.

The owner's reports are also written to a small file beside the lock, so that the workers that
wait show the same progress as the one that works.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from servekit.engines.api.base import Report
from servekit.engines.api.load_phases import phase as timed
from servekit.protocol.messages import Progress

log = logging.getLogger(__name__)

POLL_S = 0.1
_SHARE_EVERY_S = 0.2


@contextlib.contextmanager
def held(path: Path, report: Report, *, phase: str) -> Iterator[Report]:
    """Hold the lock file `path`, waiting for it as long as another process has it.

    Yields `report`, made visible to those who wait. Raises OSError if the file cannot be opened.
    """
    descriptor = _open(path)
    shared = path.with_suffix(".progress")
    try:
        if not take(descriptor):
            log.info("waiting for another worker that prepares the same model (%s)", path.stem)
            with timed("lock"):
                _wait(descriptor, shared, report, phase)
        shared.unlink(missing_ok=True)  # a dead owner's
        try:
            yield _Shared(report, shared)
        finally:
            shared.unlink(missing_ok=True)
            _fresh(shared).unlink(missing_ok=True)
    finally:
        os.close(descriptor)  # which frees the lock


def is_free(path: Path) -> bool:
    """Whether no process, this one included, holds the lock file `path` now."""
    descriptor = _open(path)
    try:
        return take(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def take(descriptor: int) -> bool:
    """Whether the lock is this process's now; it waits for nobody."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(descriptor: int, shared: Path, report: Report, phase: str) -> None:
    """Poll rather than block: the wait is spent repeating what the owner reports."""
    last = Progress(phase)
    report(last)
    while not take(descriptor):
        now = _read(shared) or last
        if now != last:
            report(now)
            last = now
        time.sleep(POLL_S)


def _fresh(shared: Path) -> Path:
    return shared.with_suffix(".progress.new")


def _read(shared: Path) -> Progress | None:
    try:
        return msgspec.json.decode(shared.read_bytes(), type=Progress)
    except (OSError, msgspec.DecodeError):
        return None


class _Shared:
    """A report that also writes what it is told to a file, a few times a second at most."""

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
        fresh = _fresh(self._path)
        with contextlib.suppress(OSError):  # it is only shown; a full disk is noticed elsewhere
            fresh.write_bytes(msgspec.json.encode(progress))
            fresh.replace(self._path)
