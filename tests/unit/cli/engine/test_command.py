"""`servekit engine list` and `remove`, with environments that are finished and that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servekit.config.engines.environments import MANIFEST
from tests.unit.cli.instance import invoke


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    found = tmp_path / "servekit" / "engines"
    found.mkdir(parents=True)
    return found


def test_none_are_an_empty_list(home: Path) -> None:
    assert json.loads(invoke("engine", "list", "--json").stdout) == []
    assert invoke("engine", "list").stdout.split() == ["NAME", "PYTHON", "SIZE", "ENGINES", "PATH"]


def test_one_that_is_not_finished_is_listed_with_the_remedy(home: Path) -> None:
    (home / "half").mkdir()
    (home / "half" / "data").write_bytes(b"x" * 100_000)
    (home / ".lock").touch()
    [found] = json.loads(invoke("engine", "list", "--json").stdout)
    assert found["name"] == "half" and found["path"] == str(home / "half")
    assert found["trouble"] == "it is not finished: remove it, or install it again"
    assert found["engines"] == [] and found["python"] == ""
    assert 100_000 <= found["bytes"] < 200_000, "as it takes on disk"
    table = invoke("engine", "list").stdout
    assert "half" in table and found["trouble"] in table


def test_remove_takes_it_away_or_says_that_there_is_none(home: Path) -> None:
    (home / "half").mkdir()
    (home / "half" / MANIFEST).write_text("{}")
    done = invoke("engine", "remove", "half")
    assert (done.exit_code, done.stdout) == (0, "half is removed\n")
    assert not (home / "half").exists()
    done = invoke("engine", "remove", "half", "--force")
    said = "there is no environment 'half'; `servekit engine list` shows them\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_install_refuses_a_wish_that_makes_no_sense(home: Path) -> None:
    done = invoke("engine", "install", "vllm latest")
    assert done.exit_code == 2 and "'vllm latest' does not name a package" in done.stderr
    done = invoke("engine", "install", "vllm", "--with", "conda")
    assert (done.exit_code, done.stderr) == (2, "--with is uv or pip, not 'conda'\n")
    done = invoke("engine", "install", "vllm", "--name", "../x")
    assert done.exit_code == 2 and "--name '../x'" in done.stderr
    done = invoke("engine", "install", "vllm", "--python", "python9.9")
    assert (done.exit_code, done.stderr) == (2, "there is no Python interpreter python9.9\n")
