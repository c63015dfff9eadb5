"""A first configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from servekit.config.load import load
from servekit.errors import ConfigError, StartError
from servekit.init import FIRST, write


def test_the_first_file_is_one_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "servekit.yaml"
    write(path, FIRST)
    assert load(path).models[0].name == "smollm2-135m-instruct"
    assert [entry.name for entry in tmp_path.iterdir()] == ["servekit.yaml"]


def test_what_is_commented_out_can_be_put_in() -> None:
    lines = [line.removeprefix("# ") for line in FIRST.splitlines()]
    from_keys = lines[next(i for i, line in enumerate(lines) if line.startswith("keys:")) :]
    [key] = yaml.safe_load("\n".join(from_keys))["keys"]
    assert set(key) == {"name", "hash", "requests_per_minute"}


def test_nothing_is_written_over_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        write(path, FIRST)
    assert path.read_text() == "mine"
    write(path, FIRST, force=True)
    assert path.read_text() == FIRST


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot write"):
        write(tmp_path / "none" / "a.yaml", FIRST)
