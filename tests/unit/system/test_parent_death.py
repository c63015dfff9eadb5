"""How a child ends with its parent, and who goes first where memory is short: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from servekit.system import procfs
from tests.polling import poll

BEGINS = "import os, signal, subprocess, sys\nfrom servekit.system.parent_death import *\n"


def run_python(code: str, *, start_new_session: bool = False) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", f"{BEGINS}{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
        start_new_session=start_new_session,
    )


def test_a_child_ends_with_its_parent_though_nothing_wakes_it() -> None:
    child = f"{BEGINS}die_with(os.getppid()); print(flush=True); signal.pause()"
    parent = run_python(
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(parent.stdout)
    poll("the child is gone", lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    found = procfs.read_process(pid)
    return found is not None and found.state != "Z"


def test_a_child_whose_parent_was_gone_before_ends_at_once() -> None:
    gone = run_python("print(os.getpid())").stdout.strip()
    late = run_python(f"die_with({gone}); print('goes on')")
    assert (late.returncode, late.stdout) == (1, "")
    with_parent = run_python("die_with(os.getppid()); print('goes on')")
    assert (with_parent.returncode, with_parent.stdout) == (0, "goes on\n")


def test_a_process_that_leads_its_group_ends_with_it() -> None:
    """Nobody else reads the pipe to its end: the process in the group holds it open, too."""
    code = "subprocess.Popen(['sleep', '600']); print('ready', flush=True); end_group()"
    done = run_python(code, start_new_session=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "ready\n")


def test_a_process_in_the_group_of_another_ends_alone() -> None:
    inner = f"{BEGINS}end_group()"
    done = run_python(
        f"print(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)",
        start_new_session=True,
    )
    assert (done.returncode, done.stdout) == (0, "1\n")


SCORE = Path("/proc/self/oom_score_adj")


def scores_after(first: int) -> list[int]:
    """Return the score of a process that starts with `first`, once and twice preferred."""
    show = f"print(open({str(SCORE)!r}).read())"
    set_first = f"open({str(SCORE)!r}, 'w').write('{first}')"
    prefer = "prefer_for_oom_kill()"
    done = run_python("\n".join([set_first, prefer, show, prefer, show]))
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_a_worker_is_preferred_where_memory_is_short_and_never_beyond_the_limit() -> None:
    own = int(SCORE.read_text())
    assert scores_after(own) == [own + 300, own + 600]
    assert scores_after(850) == [1000, 1000]
