"""Adopted processes, in interpreters of their own: a subreaper adopts what pytest starts, too."""

from __future__ import annotations

import subprocess
import sys
import textwrap

#: Has a shell leave an orphan behind and prints its PID; "" or an environment for it.
PRELUDE = """
import os, subprocess, sys, time
from servekit.system import procfs, subreaper

def orphan(**env):
    command = "sleep 60 >/dev/null & echo $!"
    process = subreaper.start_process(
        ["/bin/sh", "-c", command], stdout=subprocess.PIPE, env=env, start_new_session=True
    )
    pid = int(process.stdout.readline())
    process.wait()
    subreaper.forget_process(process)
    return pid

def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between two looks, up to the deadline

subreaper.become_subreaper()
"""


def run(code: str) -> None:
    whole = PRELUDE + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_orphans_become_ours_and_are_reaped() -> None:
    run("""
    pid = orphan()
    until(lambda: [p.pid for p in subreaper.adopted_children()] == [pid])
    os.kill(pid, 9)
    until(lambda: procfs.read_process(pid).state == "Z")
    subreaper.reap_orphans()
    assert procfs.read_process(pid) is None
    """)


def test_the_exit_of_a_child_of_our_own_is_left_to_who_waits_for_it() -> None:
    run("""
    process = subreaper.start_process(["/bin/sh", "-c", "exit 7"])
    assert subreaper.is_own(process.pid)
    until(lambda: procfs.read_process(process.pid).state == "Z")
    subreaper.reap_orphans()
    subreaper.end_adopted()
    assert process.wait() == 7
    """)


def test_a_stray_is_killed_and_who_carries_a_mark_or_was_here_before_is_not() -> None:
    run("""
    settled = orphan()
    until(lambda: subreaper.adopted_children())
    subreaper.reap_orphans(); subreaper.reap_orphans()
    marked, stray = orphan(MARK="1"), orphan()
    until(lambda: len(subreaper.adopted_children()) == 3)
    assert subreaper.kill_strays("MARK") == 1
    until(lambda: not subreaper.kill_strays("MARK"))
    assert procfs.read_process(stray) is None
    assert sorted(p.pid for p in subreaper.adopted_children()) == sorted([settled, marked])
    subreaper.end_adopted()
    assert not subreaper.adopted_children()
    """)


def test_who_adopts_nobody_kills_nobody() -> None:
    code = """
    import subprocess, sys
    from servekit.system import subreaper
    child = subprocess.Popen(["sleep", "60"])
    assert subreaper.kill_strays("MARK") == 0
    subreaper.end_adopted(); subreaper.reap_orphans()
    assert child.poll() is None
    child.kill()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
