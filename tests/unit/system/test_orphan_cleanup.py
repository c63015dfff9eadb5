"""What a dead instance has left is ended: by its group, its environment, or its limit."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from servekit.system import procfs
from servekit.system.orphan_cleanup import CHILDREN, MARK, Started, end_leftovers, read_children
from tests.polling import poll

SLEEP = ("/bin/sleep", "600")
#: Marks what it starts from now on, and starts a process without a variable, in its own session.
EMPTIES = """
import subprocess, sys
from servekit.system.orphan_cleanup import mark_by_limit
mark_by_limit(sys.argv[1])
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
print(subprocess.Popen(["/bin/sleep", "600"], env={}, start_new_session=True, **quiet).pid)
"""


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(16)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []
    yield made
    for one in made:
        if one.poll() is None:
            one.kill()
        one.wait()


def test_a_process_that_has_emptied_its_environment_is_found_by_its_limit(mark: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", EMPTIES, mark], capture_output=True, check=True, text=True
    )
    pid = int(ran.stdout)
    seen = procfs.read_process(pid)
    assert seen is not None
    try:
        assert end_leftovers([], secrets.token_hex(16)) == 0
        assert procfs.is_alive(pid, seen.started), "it is of another instance"
        assert end_leftovers([], mark) == 0
        poll("it is gone", lambda: not procfs.is_alive(pid, seen.started))
    finally:
        if procfs.is_alive(pid, seen.started):
            os.kill(pid, signal.SIGKILL)


def test_a_process_with_the_mark_is_found_in_any_session(
    mark: str, started: list[subprocess.Popen[bytes]]
) -> None:
    for value in (mark, secrets.token_hex(16)):
        started.append(subprocess.Popen(SLEEP, env={MARK: value}, start_new_session=True))
    for one in started:  # the kernel shows an environment a moment after the start of a program
        poll("it has its environment", partial(procfs.has_variable, one.pid, MARK))
    assert end_leftovers([], mark) == 0
    assert started[0].wait(60) == -signal.SIGKILL
    assert started[1].poll() is None


def test_a_childs_group_is_ended_unless_the_pid_is_anothers_now(
    mark: str, started: list[subprocess.Popen[bytes]]
) -> None:
    started += [subprocess.Popen(SLEEP, env={}, start_new_session=True) for _ in range(2)]
    births = [seen.started for one in started if (seen := procfs.read_process(one.pid))]
    children = [
        Started("a/0", started[0].pid, births[0]),
        Started("a/1", started[1].pid, births[1] - 1),
    ]
    assert end_leftovers(children, mark) == 0
    assert started[0].wait(60) == -signal.SIGKILL
    assert started[1].poll() is None


@pytest.mark.parametrize("text", ["", "[", "{}", '[{"name": "a/0"}]', '["a/0"]'])
def test_a_record_that_cannot_be_read_names_nobody(tmp_path: Path, text: str) -> None:
    assert read_children(tmp_path) == []
    (tmp_path / CHILDREN).write_text(text)
    assert read_children(tmp_path) == []
