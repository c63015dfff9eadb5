"""kill -9 of the supervisor and of its guard, early and in any order: what they leave behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from servekit.system import procfs
from tests.integration.instance import Instance, echo
from tests.polling import poll

#: Its grandchildren empty their environments and begin sessions of their own.
ESCAPING = echo("a", grandchildren=1, escaped_grandchildren=2, shared_memory_bytes=2**20)


def of(folder: Path) -> list[procfs.Process]:
    """All that runs there, by the working directory, which is passed on to everybody."""
    found = []
    for process in procfs.all_processes():
        try:
            if Path(f"/proc/{process.pid}/cwd").readlink() == folder:
                found.append(process)
        except OSError:
            pass
    return found


def segments(pids: set[int]) -> set[Path]:
    return {path for pid in pids for path in Path("/dev/shm").glob(f"servekit-echo-{pid}-*")}


def escaped(folder: Path) -> list[int]:
    here = [process.pid for process in of(folder)]
    return [pid for pid in here if procfs.command_line(pid) == "/bin/sleep 1000"]


def guards(instance: Instance) -> list[int]:
    """The guard, a child of the supervisor; two for a moment, while one follows another."""
    found = procfs.find_descendants(instance.pid)
    return [
        p.pid
        for p in found
        if "servekit.supervisor.process.orphan_guard" in procfs.command_line(p.pid, 10_000)
    ]


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def at_work(instance: Instance) -> None:
    instance.until_settled()
    assert len(escaped(instance.run_dir.parent)) == 2 and len(guards(instance)) == 1


@pytest.mark.parametrize(
    "after_s",
    [0.2, 1.0, *(pytest.param(s, marks=pytest.mark.lane("long")) for s in (0.5, 2.0, 4.0))],
)
def test_nothing_is_left_however_early_it_is_killed(tmp_path: Path, after_s: float) -> None:
    began = time.monotonic()
    seen: set[int] = set()
    with Instance.begun(tmp_path, [ESCAPING], cwd=tmp_path) as instance:
        while time.monotonic() < began + after_s:
            seen |= {process.pid for process in of(tmp_path)}
        kill(instance.pid)
        instance.process.wait()
        poll("all processes are gone", lambda: not of(tmp_path), within_s=2.0)
        poll("all segments are gone", lambda: not segments(seen), within_s=2.0)


def test_whatever_loads_when_it_is_killed_is_gone(tmp_path: Path) -> None:
    """The moment at which its grandchildren have just escaped, and nobody has seen them."""
    slow = echo("a", escaped_grandchildren=3, load_s=600)
    with Instance.begun(tmp_path, [slow], cwd=tmp_path) as instance:
        poll("they have escaped", lambda: len(escaped(tmp_path)) == 3, within_s=60)
        kill(instance.pid)
        instance.process.wait()
        poll("all processes are gone", lambda: not of(tmp_path), within_s=2.0)


def test_a_guard_that_dies_is_started_again(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [ESCAPING], cwd=tmp_path) as instance:
        at_work(instance)
        [first] = guards(instance)
        kill(first)
        [second] = instance.until(
            "there is another", lambda: [pid for pid in guards(instance) if pid != first], 10
        )
        assert instance.replica("a/0").restarts == 0
        # which does what the first would have done
        kill(instance.pid)
        instance.process.wait()
        poll("all processes are gone", lambda: not of(tmp_path), within_s=2.0)
        assert not procfs.command_line(second)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_guard_that_somebody_has_stopped_does_its_work_and_ends(
    tmp_path: Path, end: signal.Signals
) -> None:
    with Instance.up(tmp_path, [ESCAPING], cwd=tmp_path) as instance:
        at_work(instance)
        [guard] = guards(instance)
        os.kill(guard, signal.SIGSTOP)
        instance.signal(end)
        assert instance.wait() == (-end if end is signal.SIGKILL else 0)
        poll("all processes are gone", lambda: not of(tmp_path), within_s=2.0)


@pytest.mark.lane("long")
@pytest.mark.parametrize("order", ["the guard first", "both at once"])
def test_without_a_guard_our_own_end_and_the_next_start_ends_the_rest(
    tmp_path: Path, order: str
) -> None:
    with Instance.up(tmp_path, [ESCAPING], cwd=tmp_path) as instance:
        at_work(instance)
        lost = {p.pid for p in of(tmp_path) if "sleep 1000" in procfs.command_line(p.pid)}
        assert len(lost) == 3
        workers = {process.pid for process in of(tmp_path)}
        if order == "both at once":
            os.kill(instance.pid, signal.SIGSTOP)  # so that it cannot start another between
        kill(*guards(instance), instance.pid)
        instance.process.wait()
        poll("all but those are gone", lambda: {p.pid for p in of(tmp_path)} <= lost, within_s=2.0)
        with Instance.up(tmp_path, [echo("b")], cwd=tmp_path):
            poll("those are, too", lambda: not lost & {p.pid for p in of(tmp_path)}, within_s=2.0)
            assert not segments(workers)
