"""The guard of a supervisor, a real process: it waits, is replaced, and clears up after a death."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from servekit.supervisor.process import orphan_guard as module
from servekit.supervisor.process.orphan_guard import OrphanGuard
from servekit.system import procfs, shared_memory
from servekit.system.orphan_cleanup import MARK
from tests.polling import poll


def is_running(pid: int) -> bool:
    found = procfs.read_process(pid)
    return found is not None and found.state != "Z"


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(16)


# ---------------------------------------------------------------- while the supervisor lives


@pytest.fixture
def guard(tmp_path: Path, mark: str) -> Iterator[OrphanGuard]:
    made = OrphanGuard(tmp_path, mark, {**os.environ, MARK: mark})
    yield made
    made.stop_guard()


def pid_of(guard: OrphanGuard) -> int:
    return guard._process.pid


def test_it_has_a_group_of_its_own_in_our_session_and_not_our_mark(
    guard: OrphanGuard, mark: str
) -> None:
    pid = pid_of(guard)
    assert os.getpgid(pid) == pid
    assert os.getsid(pid) == os.getsid(0)
    poll("it has its environment", lambda: procfs.has_variable(pid, "PATH"))
    assert not procfs.has_variable(pid, MARK), "who ends all that has the mark spares it"


def test_a_signal_from_a_terminal_does_not_end_it(guard: OrphanGuard) -> None:
    pid = pid_of(guard)
    ignored = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    poll("it ignores them", lambda: ignored <= signals_ignored_by(pid))
    for number in ignored:
        os.kill(pid, number)
    assert not guard.restart_if_dead()
    assert is_running(pid)


def signals_ignored_by(pid: int) -> set[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")]
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


def test_one_that_was_killed_is_replaced(
    guard: OrphanGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pid_of(guard)
    assert not guard.restart_if_dead()
    monkeypatch.setattr(module, "_AGAIN_S", 600.0)
    os.kill(first, signal.SIGKILL)
    poll("it is dead", lambda: not is_running(first))
    assert not guard.restart_if_dead(), "one that dies at once is not started at each tick"
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    assert guard.restart_if_dead()
    assert pid_of(guard) != first and is_running(pid_of(guard))
    assert procfs.read_process(first) is None, "nothing is left of it"


def test_one_that_cannot_be_replaced_now_is_replaced_later(
    guard: OrphanGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    first = pid_of(guard)
    os.kill(first, signal.SIGKILL)
    poll("it is dead", lambda: not is_running(first))
    with monkeypatch.context() as no_program:
        no_program.setattr(sys, "executable", "/nowhere/python")
        assert not guard.restart_if_dead()
    assert guard.restart_if_dead()
    assert is_running(pid_of(guard))


def test_a_supervisor_that_ends_in_order_ends_it_first(tmp_path: Path, mark: str) -> None:
    guard = OrphanGuard(tmp_path, mark, os.environ)
    guard.stop_guard()
    assert procfs.read_process(pid_of(guard)) is None
    guard.stop_guard()  # it may be asked twice


# ---------------------------------------------------------------- after its death

#: Starts a process with its mark in a session of its own, and a guard, and is killed.
SUPERVISOR = """
import os, signal, subprocess, sys
from pathlib import Path
from servekit.supervisor.process.orphan_guard import OrphanGuard
from servekit.system.orphan_cleanup import MARK
folder, mark, grace_s = sys.argv[1:]
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
env = {**os.environ, MARK: mark}
child = subprocess.Popen(["/bin/sleep", "600"], env=env, start_new_session=True, **quiet)
guard = OrphanGuard(Path(folder), mark, env, float(grace_s))
print(child.pid, guard._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@dataclass(frozen=True)
class Left:
    """What a killed supervisor has left."""

    child: int
    guard: int


@pytest.fixture
def killed(tmp_path: Path, mark: str) -> Iterator[Callable[[float], Left]]:
    made: list[Left] = []

    def run(grace_s: float) -> Left:
        done = subprocess.run(
            [sys.executable, "-c", SUPERVISOR, str(tmp_path), mark, str(grace_s)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        child, guard = map(int, done.stdout.split())
        made.append(Left(child, guard))
        return made[-1]

    yield run
    for left in made:
        for pid in (left.child, left.guard):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_what_a_killed_supervisor_has_left_is_ended(
    tmp_path: Path, killed: Callable[[float], Left]
) -> None:
    path = shared_memory.DIRECTORY / f"servekit-test-{secrets.token_hex(6)}"
    path.write_bytes(b"")
    try:
        segment = shared_memory.Segment(path.name, path.stat().st_ino)
        shared_memory.record_segments(tmp_path, [segment])
        with subprocess.Popen(["/bin/sleep", "600"]) as other:
            try:
                left = killed(0.0)
                poll("its child is gone", lambda: not is_running(left.child))
                poll("the guard is gone", lambda: not is_running(left.guard))
                assert other.poll() is None, "it is nobody's"
                assert not path.exists()
            finally:
                other.kill()
    finally:
        path.unlink(missing_ok=True)


def test_a_supervisor_that_comes_in_time_gets_what_is_left(
    tmp_path: Path, killed: Callable[[float], Left]
) -> None:
    (tmp_path / "supervisor.json").write_text(json.dumps({"mark": "of the next"}))
    left = killed(60.0)
    poll("the guard is gone", lambda: not is_running(left.guard))
    assert is_running(left.child)


@pytest.mark.parametrize("text", [None, "", "{", "{}", '{"mark": "of the first"}'])
def test_a_supervisor_that_did_not_come_is_not_waited_for_any_longer(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "supervisor.json").write_text(text)
    began = time.monotonic()
    assert not module._succeeded(tmp_path, "of the first", 0.05)
    assert time.monotonic() - began >= 0.05
