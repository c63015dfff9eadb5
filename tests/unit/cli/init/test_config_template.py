"""A first configuration file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import yaml

from servekit.cli.init.config_template import (
    DEMO,
    DEMO_NAME,
    FIRST,
    TemplateOptions,
    compose_config,
    name_of,
    write_config,
)
from servekit.config import keys
from servekit.config.load import load_config
from servekit.errors import ConfigError, StartError


def test_the_first_file_is_one_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "servekit.yaml"
    write_config(path, FIRST)
    assert load_config(path).models[0].name == "smollm2-135m-instruct"
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
        write_config(path, FIRST)
    assert path.read_text() == "mine"
    write_config(path, FIRST, force=True)
    assert path.read_text() == FIRST


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot write"):
        write_config(tmp_path / "none" / "a.yaml", FIRST)


@pytest.mark.parametrize(
    "wish",
    [
        TemplateOptions(),
        TemplateOptions("Qwen/Qwen3-0.6B", "qwen3", gpus=(), machine="one, two"),
        TemplateOptions("org/name", "on", gpus=(0, 2), port=0),
        TemplateOptions("org/name", "1e3", host="0.0.0.0", key=("me", keys.new_key("me")[1])),
    ],
)
def test_whatever_is_wished_for_the_file_loads(tmp_path: Path, wish: TemplateOptions) -> None:
    path = tmp_path / "servekit.yaml"
    write_config(path, compose_config(wish))
    config = load_config(path)
    [model] = config.models
    assert (model.name, config.server.port, config.server.host) == (wish.name, wish.port, wish.host)
    assert model.path in (wish.path, str(wish.path))
    assert model.gpus == (wish.gpus or None) or model.gpus == wish.gpus
    assert (model.device == "cpu") == (wish.gpus == ())
    assert len(config.keys) == bool(wish.key)


def test_a_path_with_odd_characters_is_quoted(tmp_path: Path) -> None:
    folder = tmp_path / "models: #1 'x' \"y\" ü"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_config(
        tmp_path / "a.yaml", compose_config(TemplateOptions(str(folder), name_of(str(folder))))
    )
    [model] = load_config(tmp_path / "a.yaml").models
    assert model.path == str(folder)
    assert model.name == "models-1-x-y"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("/x/My Model.Q4_K.GGUF", "my-model.q4_k"),
        ("/x/…", "model"),
        (DEMO, DEMO_NAME),
    ],
)
def test_a_model_is_called_as_its_path_ends(path: str, name: str) -> None:
    assert name_of(path) == name


def test_a_file_system_that_is_read_only_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: object, **more: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))  # as it says to whoever is root, too

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StartError, match=r"cannot write .*x\.yaml: Read-only file system$"):
        write_config(tmp_path / "x.yaml", FIRST)
