"""A command in the place of a process: what it keeps, and that it ends with its parent."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

from servekit.system.python.python_command import module_command
from tests.polling import poll

MODULE = module_command("servekit.gateway.tool_servers.exec_with_parent")
LIMIT_BYTES = 2**34


def limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, hard))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


run = partial(subprocess.run, capture_output=True, text=True, timeout=60)


def test_the_command_runs_in_the_place_of_the_process_and_without_its_limit_of_memory() -> None:
    script = "echo $$ $1; ulimit -v"
    command = [*MODULE, str(os.getpid()), "/bin/sh", "-c", script, "sh", "an argument"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=limit_memory
    ) as process:
        said, _ = process.communicate(timeout=60)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = "unlimited" if hard == resource.RLIM_INFINITY else str(hard // 1024)
    assert said == f"{process.pid} an argument\n{limit}\n"
    assert process.returncode == 0


def test_the_exit_status_is_the_commands() -> None:
    assert run([*MODULE, str(os.getpid()), "/bin/sh", "-c", "exit 7"]).returncode == 7


def test_a_command_that_cannot_be_run_is_named() -> None:
    ended = run([*MODULE, str(os.getpid()), "/no/such/program"])
    assert ended.returncode == 1
    assert ended.stderr == "/no/such/program cannot be run: No such file or directory\n"


def test_nothing_runs_where_the_parent_is_dead_already() -> None:
    ended = run([*MODULE, "1", "/bin/sh", "-c", "echo here"])
    assert (ended.returncode, ended.stdout) == (1, "")


def test_the_command_is_killed_when_its_parent_dies() -> None:
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([*{MODULE!r}, str(os.getpid()), '/bin/sh', '-c',"
        " 'echo $$; exec sleep 3600'])\n"
        "time.sleep(3600)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    poll("the command is gone", lambda: is_gone(pid))
