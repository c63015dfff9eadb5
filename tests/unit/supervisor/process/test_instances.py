"""Which instance a command is about, found by the locks that processes hold."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from servekit.errors import NobodyRuns, StartError
from servekit.supervisor.process.instances import (
    Running,
    choose_run_dir,
    find_last,
    find_run_dir,
    list_instances,
)
from servekit.supervisor.process.run_dir import Record, RunDir, boot_id
from servekit.system import procfs


def record(pid: int = 1) -> Record:
    return Record(pid, float(pid), f"http://127.0.0.1:{pid}", "/a b.yaml", "m", boot_id())


def taken(path: Path) -> RunDir:
    made = RunDir.claim(path)
    made.record(record(os.getpid()))
    return made


def folders() -> list[Path]:
    return [one.run_dir for one in list_instances()]


def test_what_runs_is_found_without_any_variable(tmp_path: Path) -> None:
    path = tmp_path / "r"
    assert path not in folders()
    made = taken(path)
    assert folders().count(path) == 1
    [found] = [one for one in list_instances() if one.run_dir == path]
    assert (found.record.pid, found.uid) == (os.getpid(), os.getuid())
    made.unlock()
    assert path not in folders()


def test_files_of_that_name_and_records_of_others_are_none(tmp_path: Path) -> None:
    made = taken(tmp_path / "r")
    made.record(record(1))
    with (tmp_path / "lock").open("w"):
        assert not {made.path, tmp_path} & set(folders())
    made.unlock()


def test_one_whose_directory_is_just_not_there_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "command_line", lambda *_: "servekit up")
    monkeypatch.setattr("servekit.supervisor.process.instances._RESTORED_S", 10.0)
    made = taken(tmp_path / "servekit" / "r")
    shutil.rmtree(tmp_path / "servekit")

    def restore() -> None:
        time.sleep(0.3)  # it is looked for before, and for longer
        made.restore()

    thread = threading.Thread(target=restore)
    thread.start()
    try:
        assert made.path in folders()
    finally:
        thread.join()
        made.unlock()


def test_the_only_one_is_meant_or_the_default_or_the_given(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    default = tmp_path / "servekit" / "default"
    one, other = (Running(Path(name), record(), os.getuid()) for name in ("/one", "/other"))
    assert choose_run_dir(None, [one], environ) == Path("/one")
    assert choose_run_dir(Path("/given"), [one, other], environ) == Path("/given")
    assert choose_run_dir(None, [one, Running(default, record(), os.getuid())], environ) == default
    assert choose_run_dir(None, [], environ) is None


def test_several_are_listed_with_how_to_choose(tmp_path: Path) -> None:
    found = [
        Running(Path("/run/b b"), record(20), os.getuid()),
        Running(Path("/run/a"), record(10), os.getuid()),
    ]
    with pytest.raises(StartError) as told:
        choose_run_dir(None, found, {"XDG_STATE_HOME": str(tmp_path)})
    assert told.value.message.splitlines() == [
        "several instances run; --run-dir chooses:",
        "  --run-dir /run/a  (pid 10, http://127.0.0.1:10, /a b.yaml)",
        "  --run-dir '/run/b b'  (pid 20, http://127.0.0.1:20, /a b.yaml)",
    ]


def test_a_run_directory_of_another_user_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servekit.supervisor.process.instances.list_instances", list)
    (state := tmp_path / "servekit").mkdir()
    (folder := state / "default").mkdir(mode=0)
    said = f"the run directory {folder} is not ours to read; give the command as its user"
    root = os.getuid() == 0
    if root:  # who may read whatever the mode is
        os.seteuid(65534)
    try:
        for given in (folder, None):
            with pytest.raises(NobodyRuns, match=said):
                find_last(given, {"XDG_STATE_HOME": str(tmp_path)})
    finally:
        if root:
            os.seteuid(0)


def test_what_a_dead_one_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servekit.supervisor.process.instances.list_instances", list)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets have short paths there
        _find_last_in(Path(folder))


def _find_last_in(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    environ = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    with pytest.raises(NobodyRuns, match=f"no servekit runs in {tmp_path}/state"):
        find_run_dir(None, environ)
    older = RunDir.claim(tmp_path / "runtime/servekit/default")
    older.log_path("a/0").touch()
    older.record(record())
    older.unlock()
    assert find_last(None, environ) == older.path
    newer = RunDir.take_default(environ)
    newer.record(record())
    newer.unlock()
    assert find_last(None, environ) == newer.path == tmp_path / "state/servekit/default"
