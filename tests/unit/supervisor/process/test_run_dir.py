from __future__ import annotations

import contextlib
import json
import os
import pwd
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.errors import StartError
from servekit.supervisor.process.run_dir import (
    InUse,
    Record,
    RunDir,
    boot_id,
    default_paths,
    is_still_there,
    read_record,
)
from servekit.system import procfs
from servekit.system.orphan_cleanup import MARK, Started, end_leftovers, read_children

#: Of this process alone: what is swept by its mark here is not swept beside it.
DEAD = f"mark-of-a-dead-one-{os.getpid()}"
#: A process that lives until somebody ends it; no test waits for it.
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        SLEEP,
        start_new_session=True,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: DEAD},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def started(process: subprocess.Popen[bytes]) -> int:
    found = procfs.read_process(process.pid)
    assert found is not None
    return found.started


def test_it_is_private_and_leaves_only_the_lock_and_what_was_logged(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    taken = RunDir.claim(path)
    assert path.stat().st_mode & 0o777 == 0o700
    taken.record(Record(1, 2.0, "u", "c", "m"))
    taken.record_children([Started("w", 1, 2)])
    assert read_record(path) == Record(1, 2.0, "u", "c", "m")
    taken.unlock()
    assert [p.name for p in path.iterdir()] == ["lock"]
    taken = RunDir.claim(path)
    taken.log_path("a/0").write_text("said")
    taken.unlock()
    assert sorted(p.name for p in path.iterdir()) == ["lock", "logs"]


def test_a_second_instance_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    taken = RunDir.claim(tmp_path / "r")
    with pytest.raises(StartError, match=rf"in use by pid {os.getpid()};"):
        RunDir.claim(tmp_path / "r")
    taken.unlock()
    RunDir.claim(tmp_path / "r").unlock()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StartError, match="symbolic link"):
        RunDir.claim(tmp_path / "link")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    os.chown(tmp_path / "r", 12345, 12345)
    with pytest.raises(StartError, match="belongs to another user"):
        RunDir.claim(tmp_path / "r")


def test_a_directory_with_other_files_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    mode = tmp_path.stat().st_mode
    with pytest.raises(StartError, match="holds other files"):
        RunDir.claim(tmp_path)
    assert tmp_path.stat().st_mode == mode
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_path_that_no_message_can_carry_is_refused_before_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"a\xff")
    with pytest.raises(StartError, match=r"a\\udcff' is not UTF-8; choose another"):
        RunDir.claim(path)
    assert not path.exists()


def test_a_path_too_long_for_a_socket_is_refused_before_it_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100)
    with pytest.raises(StartError, match="choose a shorter one"):
        RunDir.claim(path)
    assert not path.exists()


def test_the_longest_path_allowed_holds_a_socket(tmp_path: Path) -> None:
    room = 107 - len("/control.sock") - len(os.fsencode(tmp_path)) - 1
    taken = RunDir.claim(tmp_path / ("x" * room))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(taken.control))
    taken.unlock()


def test_sockets_and_logs_have_names_of_their_own(tmp_path: Path) -> None:
    taken = RunDir.claim(tmp_path / "r")
    assert taken.new_socket() != taken.new_socket()
    assert taken.log_path("a/b/0") != taken.log_path("a.b/0")
    assert taken.log_path("a/b/0").parent == taken.logs
    taken.unlock()


def test_a_worker_leaves_nothing_beside_its_socket(tmp_path: Path) -> None:
    taken = RunDir.claim(tmp_path / "r")
    sockets = [taken.new_socket() for _ in range(11)]
    for one in (sockets[0], sockets[10]):
        one.touch()
        Path(f"{one}.jinja").touch()
        Path(f"{one}.d").mkdir()
        (Path(f"{one}.d") / "of its engine").touch()
    taken.remove_socket(sockets[0])
    left = {path.name for path in taken.path.glob("w*")}
    assert left == {"w11.sock", "w11.sock.jinja", "w11.sock.d"}
    taken.unlock()
    assert not list(taken.path.glob("w*"))


def test_a_new_start_sweeps_what_a_dead_one_left(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "r"
    RunDir.claim(path).unlock()
    (path / "w7.sock").touch()
    (path / "w7.sock.d").mkdir()
    (path / "w7.sock.d" / "of its engine").touch()
    (path / "children.json").write_text(
        json.dumps([{"name": "w", "pid": sleeper.pid, "started": started(sleeper)}])
    )
    taken = RunDir.claim(path)
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert sorted(p.name for p in path.iterdir()) == ["lock", "logs"]
    taken.unlock()


def test_the_sweep_finds_by_mark_who_left_the_group(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "r"
    RunDir.claim(path).unlock()
    (path / "supervisor.json").write_text(
        json.dumps({"pid": 1, "started_at": 0.0, "url": "", "config": "", "mark": DEAD})
    )
    RunDir.claim(path).unlock()
    assert sleeper.wait(timeout=5) == -signal.SIGKILL


def test_a_pid_that_belongs_to_another_program_now_is_left_alone(
    sleeper: subprocess.Popen[bytes],
) -> None:
    end_leftovers([Started("w", sleeper.pid, started(sleeper) - 1)], "another mark")
    assert sleeper.poll() is None


def test_records_of_nonsense_are_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "r"
    RunDir.claim(path).unlock()
    for name in ("supervisor.json", "children.json"):
        (path / name).write_text('{"half')
    assert read_record(path) is None
    RunDir.claim(path).unlock()


def test_the_default_survives_a_logout_and_has_fallbacks(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": "/state", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/home/a"}
    fallback = Path(f"/tmp/servekit-{os.getuid()}/servekit/default")
    host = socket.gethostname()
    assert default_paths(environ) == [
        Path("/state/servekit/default"),
        Path(f"/state/servekit/default@{host}"),
        tmp_path / "servekit" / "default",
        fallback,
    ]
    missing = str(tmp_path / "missing")
    home = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": missing, "XDG_STATE_HOME": "relative"}
    state = tmp_path / ".local/state/servekit"
    assert default_paths(home) == [state / "default", state / f"default@{host}", fallback]


def test_a_home_of_another_user_is_not_written_to(tmp_path: Path) -> None:
    """As `sudo` may leave it, and where nobody says."""
    own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".local/state/servekit/default"
    assert default_paths({"HOME": "/proc/1/root/nobody"})[0] != Path("/proc/1/root/nobody")
    for environ in ({}, {"HOME": "relative"}, {"HOME": ""}):
        assert default_paths(environ)[0] == own
    if os.getuid() == 0:
        os.chown(tmp_path, 12345, 12345)
        assert default_paths({"HOME": str(tmp_path)})[0] == own


def test_where_the_state_directory_cannot_be_used_another_is(short: Path) -> None:
    (short / "state").touch()  # no directory can be made below a file, whoever we are
    (short / "runtime").mkdir()
    environ = {
        "XDG_STATE_HOME": str(short / "state"),
        "XDG_RUNTIME_DIR": str(short / "runtime"),
    }
    taken = RunDir.take_default(environ)
    assert taken.path == short / "runtime/servekit/default"
    assert "Not a directory" in taken.instead_of
    taken.unlock()
    environ["XDG_STATE_HOME"] = str(short / ("x" * 100))
    taken = RunDir.take_default(environ)
    assert taken.path == short / "runtime/servekit/default"
    assert "socket paths" in taken.instead_of
    with pytest.raises(StartError, match="socket paths"):  # one that was asked for is not another
        RunDir.claim(short / ("x" * 100))
    taken.unlock()


def test_a_default_that_is_in_use_is_told_unless_another_machine_has_it(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    first = RunDir.take_default(environ)
    first.record(Record(1, 2.0, "u", "c", "m", boot_id()))
    with pytest.raises(InUse, match="in use by pid"):
        RunDir.take_default(environ)
    first.record(Record(1, 2.0, "u", "c", "m", "the boot of another machine"))
    second = RunDir.take_default(environ)
    assert second.path == tmp_path / f"servekit/default@{socket.gethostname()}"
    second.unlock()
    first.unlock()


def test_what_was_removed_is_made_anew_with_its_lock_and_record(tmp_path: Path) -> None:
    taken = RunDir.claim(tmp_path / "a" / "r")
    taken.record(Record(1, 2.0, "u", "c", "m"))
    assert not taken.restore()
    shutil.rmtree(tmp_path / "a")
    assert taken.restore() and not taken.restore()
    assert taken.path.stat().st_mode & 0o777 == 0o700 and taken.logs.is_dir()
    assert read_record(taken.path) == Record(1, 2.0, "u", "c", "m")
    with pytest.raises(StartError, match=f"in use by pid {os.getpid()}"):
        RunDir.claim(taken.path)
    (taken.path / "lock").unlink()
    assert taken.restore()
    with pytest.raises(StartError, match="in use"):
        RunDir.claim(taken.path)
    shutil.rmtree(tmp_path / "a")
    other = RunDir.claim(taken.path)
    with pytest.raises(StartError, match="in use"):
        taken.restore()
    other.unlock()
    taken.unlock()


def test_what_another_boot_has_left_is_not_ended(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """Its PIDs and birthmarks are those of other processes by now."""
    path = tmp_path / "r"
    for boot, ended in (("another boot", False), (boot_id(), True)):
        RunDir.claim(path).unlock()
        record = {"pid": 1, "started_at": 0.0, "url": "", "config": "", "mark": "", "boot": boot}
        (path / "supervisor.json").write_text(json.dumps(record))
        (path / "children.json").write_text(
            json.dumps([{"name": "w", "pid": sleeper.pid, "started": started(sleeper)}])
        )
        RunDir.claim(path).unlock()
        if ended:
            assert sleeper.wait(timeout=5) == -signal.SIGKILL
        else:
            assert sleeper.poll() is None


def test_sweeping_nothing_is_quick() -> None:
    began = time.monotonic()
    assert end_leftovers([], "nobody-carries-this") == 0
    assert time.monotonic() - began < 10.0


@contextlib.contextmanager
def no_room(size_bytes: int = 0) -> Iterator[None]:
    """No file can be made longer than this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_room_there_is_no_instance_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with no_room(), pytest.raises(StartError, match=r"too large; choose another with --run-dir"):
        RunDir.claim(path)
    assert list(tmp_path.iterdir()) == []
    taken = RunDir.claim(path)
    with no_room(16), pytest.raises(StartError, match="choose another"):  # the lock's PID fits
        taken.record(Record(1, 2.0, "u", "c", "m"))
    taken.unlock()
    assert list(tmp_path.iterdir()) == []


def test_without_room_what_a_dead_one_left_is_for_the_next_start(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "r"
    RunDir.claim(path).unlock()
    left = json.dumps([{"name": "w", "pid": sleeper.pid, "started": started(sleeper)}])
    (path / "children.json").write_text(left)
    with no_room(), pytest.raises(StartError, match="choose another"):
        RunDir.claim(path)
    assert sleeper.poll() is None
    RunDir.claim(path).unlock()
    assert sleeper.wait(timeout=5) == -signal.SIGKILL


def test_a_record_that_finds_no_room_leaves_the_old_one(tmp_path: Path) -> None:
    taken = RunDir.claim(tmp_path / "r")
    taken.record_children([Started("w", 1, 2)])
    with no_room(16), pytest.raises(OSError, match="too large"):
        taken.record_children([Started("w", 3, 4)])
    assert read_children(taken.path) == [Started("w", 1, 2)]
    assert not list(taken.path.glob("*.new"))
    taken.unlock()


def test_the_lock_of_a_start_in_vain_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Removed between our opening it and our locking it: what is locked would be no file at all."""
    path = tmp_path / "r"
    path.mkdir()
    in_vain = os.open(path / "lock", os.O_CREAT | os.O_RDWR)
    (path / "lock").unlink()
    assert not is_still_there(in_vain, path / "lock")
    taken = RunDir.claim(path)
    assert not is_still_there(in_vain, path / "lock")
    with pytest.raises(StartError, match="in use"):
        RunDir.claim(path)
    taken.unlock()
    os.close(in_vain)
