"""A lock between processes: whoever waits reports what its owner does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from servekit.engines.model_files import file_lock
from servekit.engines.model_files.file_lock import hold_lock, is_free
from servekit.protocol.messages import Progress
from tests.polling import poll


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.lock"


class Waiter:
    """Another holder of the lock, in a thread: flock tells descriptors apart, not processes."""

    def __init__(self, path: Path) -> None:
        self.told: list[Progress] = []
        self.has_it = threading.Event()
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()

    def _run(self, path: Path) -> None:
        with hold_lock(path, self.told.append, phase="fetch"):
            self.has_it.set()
            self.over.wait(60)

    def end(self) -> None:
        self.over.set()
        self._thread.join()


def test_a_lock_is_free_again_after_its_owner(path: Path) -> None:
    assert is_free(path)
    told: list[Progress] = []
    with hold_lock(path, told.append, phase="fetch") as report:
        assert not is_free(path)
        report(Progress("fetch", 1, 2))
    assert told == [Progress("fetch", 1, 2)] and is_free(path)
    assert [one.name for one in path.parent.iterdir()] == ["model.lock"]


def test_whoever_waits_reports_the_owners_progress(path: Path) -> None:
    with hold_lock(path, lambda _: None, phase="fetch") as report:
        waiter = Waiter(path)
        poll("it waits", lambda: waiter.told == [Progress("fetch")])
        report(Progress("fetch", 3, 10))
        poll("it has heard", lambda: waiter.told[-1] == Progress("fetch", 3, 10))
        report(Progress("convert"))  # a new phase is told at once
        poll("it has heard again", lambda: waiter.told[-1] == Progress("convert"))
        assert not waiter.has_it.is_set()
    assert waiter.has_it.wait(60)
    waiter.end()
    assert waiter.told == [Progress("fetch"), Progress("fetch", 3, 10), Progress("convert")]


def test_progress_is_shared_a_few_times_a_second(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock, "_SHARE_EVERY_S", 3600.0)
    shared, told = path.with_suffix(".progress"), list[Progress]()
    with hold_lock(path, told.append, phase="fetch") as report:
        report(Progress("fetch", 1, 9))
        first = shared.read_bytes()
        report(Progress("fetch", 2, 9))
        assert shared.read_bytes() == first
        report(Progress("convert", 1, 9))
        assert shared.read_bytes() != first, "a new phase does not wait"
    assert len(told) == 3, "its own report misses nothing"


def test_what_a_dead_owner_has_left_is_not_told(path: Path) -> None:
    shared = path.with_suffix(".progress")
    shared.write_text('{"phase": "convert"}')
    with hold_lock(path, lambda _: None, phase="fetch"):
        assert not shared.exists()
        shared.write_text("no progress")  # nor is what cannot be read
        waiter = Waiter(path)
        poll("it waits", lambda: waiter.told == [Progress("fetch")])
    assert waiter.has_it.wait(60)
    waiter.end()
    assert waiter.told == [Progress("fetch")]


def test_a_full_disk_costs_the_display_only(path: Path) -> None:
    told: list[Progress] = []
    with hold_lock(path, told.append, phase="fetch") as report:
        path.with_suffix(".progress").mkdir()  # so that nothing can replace it
        report(Progress("fetch", 1, 2))
        path.with_suffix(".progress").rmdir()
    assert told == [Progress("fetch", 1, 2)]
