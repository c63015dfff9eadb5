"""The parent of an actor's process: what it reports, and that nothing outlives the actor."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from servekit.ray.process import actor_supervisor as module
from servekit.system import procfs
from servekit.system.orphan_cleanup import MARK
from servekit.system.parent_death import CHILD_MARK
from tests.polling import poll

#: Runs the module with a program of ours as the worker, of which the arguments are taken off.
RUN = """
import sys
from servekit.ray.process import actor_supervisor as module
program, role, mark, fd, *args = sys.argv[1:]
module.python_command.module_command = lambda name: (sys.executable, "-c", program, name)
module.supervise_process(role, mark, int(fd), args)
"""
#: Writes what it has got to a file, and does what its second argument says.
WORKER = """
import json, os, signal, subprocess, sys
name, path, what, *rest = sys.argv[1:]
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
started = []
if what == "breed":
    sleep = ["/bin/sleep", "600"]
    started.append(subprocess.Popen(sleep, **quiet).pid)
    started.append(subprocess.Popen(sleep, start_new_session=True, **quiet).pid)
    started.append(subprocess.Popen(sleep, start_new_session=True, env={}, **quiet).pid)
ignored = [n for n in (2, 15, 1) if signal.getsignal(n) is signal.SIG_IGN]
told = {"name": name, "rest": rest, "started": started, "ppid": os.getppid(), "pid": os.getpid(),
    "mark": os.environ.get("SERVEKIT_CHILD"), "sid": os.getsid(0), "ignored": ignored}
with open(path + ".new", "w") as file:
    json.dump(told, file)
os.rename(path + ".new", path)
if what == "exit":
    sys.exit(3)
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""


class Supervised:
    """A supervisor of a program, as the actor has it."""

    def __init__(self, folder: Path, what: str) -> None:
        self.mark = secrets.token_hex(16)
        self.path = folder / "told"
        reading, writing = os.pipe()
        command = [sys.executable, "-c", RUN, WORKER, "worker", self.mark, str(writing)]
        env = {name: value for name, value in os.environ.items() if name not in (CHILD_MARK, MARK)}
        self.process = subprocess.Popen(
            [*command, str(self.path), what, "--report-fd", str(writing)],
            stdin=subprocess.PIPE,
            pass_fds=(writing,),
            env={**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        os.close(writing)
        self.reports = os.fdopen(reading)

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.reports.readline())
        return found

    def told(self) -> dict[str, Any]:
        poll("the worker has written", self.path.exists)
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    def let_go(self) -> None:
        """End the actor: its end of the pipe is closed."""
        assert self.process.stdin is not None
        self.process.stdin.close()


Run = Callable[[str], Supervised]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made: list[Supervised] = []

    def start(what: str) -> Supervised:
        made.append(Supervised(tmp_path, what))
        return made[-1]

    yield start
    for one in made:
        one.let_go()
        one.process.wait(60)
        one.reports.close()


def is_gone(pid: int) -> bool:
    found = procfs.read_process(pid)
    return found is None or found.state == "Z"


def test_it_starts_the_process_in_a_session_of_its_own_with_its_mark(run: Run) -> None:
    one = run("wait")
    pid = one.report()["pid"]
    told = one.told()
    assert (told["pid"], told["sid"], told["ppid"]) == (pid, pid, one.process.pid)
    assert (told["name"], told["mark"]) == ("servekit.worker", one.mark)
    assert told["rest"][-2:] == ["--parent-pid", str(one.process.pid)]


@pytest.mark.parametrize(("what", "code"), [("exit", 3), ("kill", -signal.SIGKILL)])
def test_how_the_process_has_ended_is_reported(run: Run, what: str, code: int) -> None:
    one = run(what)
    assert one.report()["pid"] == one.told()["pid"]
    assert one.report() == {"code": code, "out_of_memory": False}
    assert one.process.wait(60) == 0


def test_nothing_outlives_the_actor_whatever_session_it_moved_to(run: Run) -> None:
    one = run("breed")
    pid = one.report()["pid"]
    started = one.told()["started"]
    assert len(started) == 3 and not any(map(is_gone, started))
    one.let_go()
    assert one.process.wait(60) == 0
    assert one.report()["code"] == -signal.SIGKILL
    for left in (pid, *started):
        poll("it is gone", partial(is_gone, left))


def test_a_signal_to_its_group_does_not_end_it(run: Run) -> None:
    """As Ctrl-C in a terminal where `ray start --block` runs."""
    one = run("wait")
    one.report()
    one.told()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        one.process.send_signal(number)
    assert not is_gone(one.process.pid)
    one.let_go()
    assert one.process.wait(60) == 0, "it has ended in order, after them"


def test_it_waits_without_the_kernels_help_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a kernel without pidfds."""

    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    reading, writing = os.pipe()
    kept = os.dup(0)
    try:
        os.dup2(reading, 0)
        with subprocess.Popen(["/bin/sleep", "0.01"]) as short:
            module._until_over(short)
            assert short.wait(60) == 0
        with subprocess.Popen(["/bin/sleep", "600"]) as long:
            os.close(writing)
            module._until_over(long)  # the actor is gone
            assert long.poll() is None
            long.kill()
    finally:
        os.dup2(kept, 0)
        for fd in (kept, reading):
            os.close(fd)
