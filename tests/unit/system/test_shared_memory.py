from __future__ import annotations

import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.system import shared_memory
from servekit.system.shared_memory import DIRECTORY, Segment


@pytest.fixture
def path() -> Iterator[Path]:
    path = DIRECTORY / f"servekit-test-{secrets.token_hex(6)}"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def segment(path: Path) -> Segment:
    return Segment(path.name, path.stat().st_ino)


def test_what_is_mapped_is_seen_and_stays_while_it_is(path: Path) -> None:
    it = segment(path)
    assert it not in shared_memory.mapped_segments([os.getpid()])
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert it in shared_memory.mapped_segments([os.getpid()])
        assert shared_memory.remove_segments([it]) == 0
        assert path.exists()
    assert shared_memory.remove_segments([it]) == 1
    assert not path.exists()
    assert shared_memory.remove_segments([it]) == 0


def test_another_one_of_the_same_name_stays(path: Path) -> None:
    old = segment(path)
    fresh = path.with_name(path.name + "n")
    fresh.write_bytes(b"")
    fresh.replace(path)
    assert shared_memory.remove_segments([old]) == 0
    assert path.exists()


def test_names_with_blanks_and_those_removed_already(path: Path) -> None:
    odd = path.rename(path.with_name(path.name + " a (b"))
    try:
        with odd.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert segment(odd) in shared_memory.mapped_segments([os.getpid()])
            odd.unlink()
            assert not [
                s for s in shared_memory.mapped_segments([os.getpid()]) if s.name == odd.name
            ]
    finally:
        odd.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["torch_{}_7_0", "servekit-echo-{}-ab12", "psm_{}"])
def test_those_named_after_a_dead_maker(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True
    )
    maker = int(done.stdout)
    path = DIRECTORY / name.format(maker)
    path.write_bytes(b"")
    try:
        assert shared_memory.named_after({maker}) == {segment(path)}
        assert shared_memory.named_after({maker + 1}) == set()
        shared_memory.sweep_segments(tmp_path, {maker + 1})
        assert path.exists()
        shared_memory.sweep_segments(tmp_path, {maker})
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_the_note_in_the_run_directory(tmp_path: Path) -> None:
    assert shared_memory.recorded_segments(tmp_path) == set()
    segments = {Segment("a", 1), Segment("b", 2)}
    shared_memory.record_segments(tmp_path, segments)
    assert shared_memory.recorded_segments(tmp_path) == segments
    (tmp_path / shared_memory.SEGMENTS).write_text('[{"name": "a"')
    assert shared_memory.recorded_segments(tmp_path) == set()
