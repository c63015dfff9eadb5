"""What a standby prepares, found in its forks; each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from servekit import engines
from servekit.errors import LoadError
from tests.unit.engines import harness

PRELUDE = """
import os, sys
from pathlib import Path
from servekit import engines
from servekit.engines.transformers import preload
from tests.unit.engines import harness

spec = harness.make_spec({folder!r})

def forked(function):
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        engines.reinitialize_libraries()
        os.write(writing, repr(function()).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return eval(os.read(reading, 65536))
"""


def run(folder: Path, code: str) -> None:
    whole = PRELUDE.format(folder=str(folder)) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", whole],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[4],
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    harness.write_tiny_llama(path)
    return path


@pytest.mark.lane("long")
def test_a_fork_finds_what_was_prepared_and_says_what_a_fresh_engine_says(folder: Path) -> None:
    run(
        folder,
        """
        def answer():
            running = harness.Harness(spec)
            ids = running.generate([5, 6, 7, 8], max_tokens=8)
            known = preload._prepared
            own = known is None or running.engine._grammars is not known.grammars
            running.close()
            return ids, running.info.serves, own
        afresh = forked(answer)
        engines.prepare_engine(spec)
        prepared = forked(answer)
        assert prepared[:2] == afresh[:2] == forked(answer)[:2]
        assert (afresh[2], prepared[2]) == (True, False)
        """,
    )


@pytest.mark.lane("models")
def test_forks_draw_different_numbers(folder: Path) -> None:
    run(
        folder,
        """
        import random, numpy, torch
        engines.prepare_engine(spec)
        draw = lambda: (torch.rand(1).item(), numpy.random.rand(), random.random())
        first, second = forked(draw), forked(draw)
        assert not set(first) & set(second)
        """,
    )


def test_what_cannot_be_prepared_says_why(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json"):
        engines.prepare_engine(harness.make_spec(tmp_path))


def test_a_process_whose_cuda_was_initialised_before_the_fork_is_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(LoadError, match="CUDA cannot be used after a fork"):
        engines.reinitialize_libraries()
