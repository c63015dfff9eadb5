"""The contract can be asked of an engine of another package, by a configuration file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import markov
from tests.plugin_site import path_with

TESTS = Path(__file__).parent


@pytest.mark.lane("long")
def test_the_models_of_a_file_are_tried(tmp_path: Path) -> None:
    file = tmp_path / "servekit.yaml"
    corpus = markov.write_corpus(tmp_path / "texts")
    file.write_text(f"models:\n  - {{name: mine, engine: markov, path: {corpus}}}\n")
    site = markov.install(tmp_path / "site")
    few = "mine and (makes_sense or told_apart or max_tokens_is_exact)"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS, "-k", few],
        cwd=TESTS.parents[3],
        env=os.environ | path_with(site) | {"SERVEKIT_CONTRACT": str(file)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "6 passed" in run.stdout
