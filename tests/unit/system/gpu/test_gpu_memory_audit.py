"""Who belongs to a worker, and whether it holds memory where it may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from servekit.system import procfs
from servekit.system.gpu.gpu_memory_audit import group_of, one_look

#: Starts another one in its group, for each line that it is told.
STARTER = """
import subprocess, sys
for line in sys.stdin:
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
"""


@pytest.fixture
def starter() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", STARTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        os.killpg(process.pid, 9)


def another(starter: subprocess.Popen[str]) -> int:
    assert starter.stdin is not None and starter.stdout is not None
    starter.stdin.write("\n")
    starter.stdin.flush()
    return int(starter.stdout.readline())


def test_a_group_is_a_process_and_what_it_has_started(starter: subprocess.Popen[str]) -> None:
    assert group_of(starter.pid) == {starter.pid}
    first = another(starter)
    assert group_of(starter.pid) == {starter.pid, first}
    assert os.getpid() not in group_of(starter.pid)


def test_one_look_is_one(starter: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, looks = another(starter), 0
    everyone = procfs.all_processes

    def counted() -> Iterator[procfs.Process]:
        nonlocal looks
        looks += 1
        return everyone()

    monkeypatch.setattr(procfs, "all_processes", counted)
    with one_look():
        second = another(starter)
        for _ in range(8):
            assert group_of(starter.pid) == {starter.pid, first}
            assert group_of(second) == {second}  # of whoever leads no group
    assert looks == 1
    assert group_of(starter.pid) == {starter.pid, first, second}
