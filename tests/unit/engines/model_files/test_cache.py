"""The cache: whole entries or none, whatever happens to the process that builds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.engines.api.base import Report
from servekit.engines.model_files import file_lock
from servekit.engines.model_files.cache import MARKER, Cache, Key, default_root
from servekit.errors import LoadError
from servekit.protocol.messages import Progress

KEY = Key("a model/of:mine", ("test", "1"))


_HOLD = """
import pathlib, sys
from servekit.engines.model_files import file_lock
with file_lock.hold_lock(pathlib.Path(sys.argv[1]), print, phase="fetch"):
    print("held", flush=True)
    sys.stdin.read()
"""


def ignore(_: Progress) -> None:
    pass


def build(folder: Path, report: Report) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("content")


def refuse(folder: Path, report: Report) -> None:
    raise AssertionError("built again")


def names(cache: Cache) -> list[str]:
    return sorted(p.name for p in cache.root.iterdir() if p.name != ".locks")


def test_an_entry_is_built_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.find(KEY) is None
    entry = cache.obtain(KEY, build, ignore, phase="fetch")
    assert (entry / "sub" / "file").read_text() == "content"
    assert cache.obtain(KEY, refuse, ignore, phase="fetch") == entry == cache.find(KEY)
    assert names(cache) == [entry.name]


def test_names_are_readable_and_differ_by_identity() -> None:
    assert KEY.name.startswith("a-model-of-mine-")
    assert KEY.name != Key(KEY.label, ("test", "2")).name
    assert Key("x", ("a", "bc")).name != Key("x", ("ab", "c")).name


def test_an_entry_can_be_read_by_others(tmp_path: Path) -> None:
    entry = Cache(tmp_path).obtain(KEY, build, ignore, phase="fetch")
    assert entry.stat().st_mode & 0o777 == 0o755
    assert (entry / MARKER).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [LoadError("no"), OSError(5, "I/O"), KeyboardInterrupt()])
def test_a_failed_build_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail(folder: Path, report: Report) -> None:
        (folder / "half").write_text("h")
        raise error

    cache = Cache(tmp_path)
    with pytest.raises((LoadError, KeyboardInterrupt)):
        cache.obtain(KEY, fail, ignore, phase="fetch")
    assert names(cache) == []
    cache.obtain(KEY, build, ignore, phase="fetch")


@pytest.mark.parametrize("spoil", ["shorten", "remove", "unmark", "garble", "no UTF-8"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, spoil: str) -> None:
    cache = Cache(tmp_path)
    entry = cache.obtain(KEY, build, ignore, phase="fetch")
    match spoil:
        case "shorten":
            (entry / "sub" / "file").write_text("con")
        case "remove":
            (entry / "sub" / "file").unlink()
        case "unmark":
            (entry / MARKER).unlink()
        case "garble":
            (entry / MARKER).write_text("{")
        case _:
            (entry / MARKER).write_bytes(b'{"identity":["\xff"],"files":{}}')
    assert cache.find(KEY) is None
    assert cache.obtain(KEY, build, ignore, phase="fetch") == entry
    assert (entry / "sub" / "file").read_text() == "content"
    assert names(cache) == [entry.name]


def test_progress_that_is_no_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "garbled").write_bytes(b'{"phase":"\xff"}')
    assert file_lock._read_progress(tmp_path / "garbled") is None


def test_what_dead_owners_left_is_swept_and_what_living_ones_build_is_not(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    dead, living = Key("dead", ("d",)), Key("living", ("l",))
    for key in (dead, living, KEY):
        (tmp_path / f".partial-{key.name}.x1").mkdir()
    with cache.locked(living, ignore, phase="fetch"):
        entry = cache.obtain(KEY, build, ignore, phase="fetch")
    assert names(cache) == sorted([f".partial-{living.name}.x1", entry.name])


def test_a_lock_is_freed_by_the_kernel_when_its_owner_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    owner = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    with owner:
        try:
            assert owner.stdout and owner.stdout.readline() == b"held\n"
            assert not file_lock.is_free(path)
        finally:
            owner.kill()
    assert file_lock.is_free(path)


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path, free_bytes=lambda _: 999)
    with pytest.raises(LoadError, match=r"tiny: 1000 bytes are needed in .* and 999 are free"):
        cache.require(1000, "tiny")
    cache.require(999, "tiny")


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "models")
    with pytest.raises(LoadError, match=r"file/models cannot be used .*XDG_CACHE_HOME"):
        cache.obtain(KEY, build, ignore, phase="fetch")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_is_read_only_serves_what_it_holds(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    entry = cache.obtain(KEY, build, ignore, phase="fetch")
    tmp_path.chmod(0o555)
    try:
        assert cache.obtain(KEY, refuse, ignore, phase="fetch") == entry
        with pytest.raises(LoadError, match="cannot be used"):
            cache.obtain(Key("new", ("n",)), build, ignore, phase="fetch")
    finally:
        tmp_path.chmod(0o755)


def test_the_root_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "servekit" / "models"
    monkeypatch.setenv("HOME", "/home/someone")
    for ignored in ("relative/path", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_root() == Path("/home/someone/.cache/servekit/models")
