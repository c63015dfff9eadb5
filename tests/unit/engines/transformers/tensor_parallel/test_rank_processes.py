"""Ranks as processes: whoever of them dies is named, with why."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.engines.transformers.tensor_parallel.rank_processes import Children

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[5]


class Told:
    """What was said of a death."""

    def __init__(self) -> None:
        self.reason = ""
        self._said = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self._said.set()

    def wait(self) -> str:
        assert self._said.wait(DEADLINE_S)
        return self.reason

    @property
    def silent(self) -> bool:
        return not self._said.is_set()


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield


def test_a_rank_that_is_killed_is_named_and_the_others_are_ended() -> None:
    told = Told()
    children = Children(3, told)
    first, second = children.pids
    os.kill(second, signal.SIGKILL)
    assert told.wait() == f"rank 2 of 3 (pid {second}) was killed by SIGKILL"
    children.close()
    assert not _alive(first)


def test_what_a_rank_wrote_last_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such thing as torch')\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    told = Told()
    children = Children(2, told)
    reason = told.wait()
    assert "exited with code 1" in reason
    assert reason.endswith("ImportError: no such thing as torch")
    children.close()
    assert "no such thing as torch" in capfd.readouterr().err  # in the log, too


def test_ended_by_us_they_are_reaped_and_nothing_is_said() -> None:
    told = Told()
    children = Children(3, told)
    pids = children.pids
    children.close()
    assert not any(map(_alive, pids))
    assert told.silent


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
