from __future__ import annotations

import signal

import pytest

from servekit.supervisor.lifecycle.exit_history import ExitHistory, LastSeen, find_exhausted_memory
from servekit.supervisor.process.child_process import Exit

KNOWN = LastSeen(pid=7, lived_s=1.5, phase="ready", served=3, running=2, rss_bytes=5, gpu_bytes=6)


def test_a_death_is_kept_with_all_that_was_known() -> None:
    history = ExitHistory()
    history.add_exit(Exit(None, signal.SIGKILL, ("last",), stacks=("stack",)), KNOWN, "killed")
    (record,) = history.exits()
    assert (record.pid, record.phase, record.served, record.running) == (7, "ready", 3, 2)
    assert (record.rss_bytes, record.gpu_bytes, record.code, record.signal) == (5, 6, None, 9)
    assert (record.what, record.tail, record.stacks) == ("killed", ("last",), ("stack",))


def test_ten_are_kept_the_last_last_and_the_stacks_of_two() -> None:
    history = ExitHistory()
    for number in range(15):
        history.add_exit(Exit(number, None, (), stacks=("s",)), KNOWN, str(number))
    assert [record.what for record in history.exits()] == [str(n) for n in range(5, 15)]
    assert [bool(record.stacks) for record in history.exits()] == [False] * 8 + [True] * 2


@pytest.mark.parametrize(
    ("exit_", "what", "guess"),
    [
        (Exit(None, 9, (), out_of_memory=True), "", "host"),
        (Exit(None, 9, ()), "killed by SIGKILL", ""),
        (Exit(1, None, ("torch.OutOfMemoryError: CUDA out of memory. Tried",)), "", "gpu"),
        (Exit(3, None, ()), "CUDA out of memory", "gpu"),
    ],
)
def test_out_of_memory_is_guessed(exit_: Exit, what: str, guess: str) -> None:
    assert find_exhausted_memory(exit_, what) == guess
