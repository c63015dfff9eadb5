from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from servekit.system import procfs


def test_reads_ourselves() -> None:
    me = procfs.read_process(os.getpid())
    assert me is not None
    assert (me.parent, me.group, me.state) == (os.getppid(), os.getpgrp(), "R")
    assert procfs.is_alive(me.pid, me.started)
    assert not procfs.is_alive(me.pid, me.started + 1)
    assert procfs.rss_bytes(me.pid) > 2**20
    assert "python" in procfs.command_line(me.pid) or "pytest" in procfs.command_line(me.pid)


def test_a_command_with_a_parenthesis_in_its_name_is_read() -> None:
    code = (
        "import sys; open('/proc/self/comm', 'w').write('a) R (b'); print(1, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    found = procfs.read_process(process.pid)
    assert found is not None
    assert found.parent == os.getpid()
    process.communicate(b"\n")


def test_a_zombie_is_no_longer_alive() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    found = procfs.read_process(process.pid)
    assert found is not None
    assert found.state == "Z"
    assert not procfs.is_alive(process.pid, found.started)
    assert process.pid not in [p.pid for p in procfs.all_processes()]
    process.wait()
    assert procfs.read_process(process.pid) is None
    assert procfs.rss_bytes(process.pid) == 0
    assert procfs.command_line(process.pid) == ""


def test_marks_are_whole_variables_and_never_our_own() -> None:
    env = {**os.environ, "SOME_MARK": "abc"}
    process = subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert [p.pid for p in procfs.find_marked("SOME_MARK=abc")] == [process.pid]
    assert list(procfs.find_marked("SOME_MARK=ab")) == []
    process.communicate(b"\n")


def test_long_commands_are_cut() -> None:
    assert len(procfs.command_line(os.getpid(), 10)) <= 10


def test_of_a_program_that_lies_deep_its_name_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    (folder / "cat").symlink_to("/bin/cat")
    with subprocess.Popen(
        [folder / "cat", "-u", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"it runs\n")
        process.stdin.flush()
        process.stdout.readline()  # a program's words are there a moment after it was started
        assert procfs.command_line(process.pid) == "cat -u -"
        assert procfs.command_line(process.pid, 4096) == f"{folder}/cat -u -"
        process.stdin.close()


def test_descendants_are_children_and_theirs() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None
        sleeper = int(shell.stdout.readline())
        try:
            found = [process.pid for process in procfs.find_descendants(os.getpid())]
            assert {shell.pid, sleeper} <= set(found)
            assert [p.pid for p in procfs.find_descendants(shell.pid)] == [sleeper]
            assert procfs.has_variable(sleeper, "PATH")
            assert not procfs.has_variable(sleeper, "PAT")
        finally:
            os.kill(sleeper, signal.SIGKILL)


def test_what_belongs_to_a_process_counts_with_what_only_it_has() -> None:
    code = "kept = bytes(64 << 20).replace(b'\\0', b'a'); print(1, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    alone = procfs.rss_bytes(os.getpid())
    more = procfs.rss_bytes(os.getpid(), {process.pid}) - alone
    assert 60 << 20 < more < procfs.rss_bytes(process.pid) + (4 << 20)
    process.communicate(b"\n")
