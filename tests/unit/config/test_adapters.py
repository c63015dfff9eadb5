"""Adapters in the file: names of their own, folders that are adapters, and where they are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from servekit.config.engines.options import KINDS
from servekit.config.load import load_config
from tests.unit.config.test_load import complaints, write

HEAD = """
    models:
      - name: m
        engine: echo
        path: p
        aliases: [other]
        adapters:
"""


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    return path


def filed(tmp_path: Path, *lines: str, more: str = "") -> Path:
    return write(tmp_path, HEAD + "".join(f"          - {line}\n" for line in lines) + more)


def test_a_path_is_relative_to_the_file_and_a_hub_id_stays(tmp_path: Path) -> None:
    folder(tmp_path / "x")
    path = filed(tmp_path, "{name: x, path: ./x}", "{name: y, path: org/y, revision: main}")
    [model] = load_config(path).models
    assert [(one.name, one.path, one.revision) for one in model.adapters] == [
        ("x", str(tmp_path / "x"), None),
        ("y", "org/y", "main"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{name: x, path: ./nowhere}", "models[0].adapters[0].path: "),
        ("{name: x, path: ./nowhere}", "does not exist."),
        ("{name: x, path: ./empty}", "holds no adapter_config.json, so it is not an adapter."),
        ("{name: x, path: ./x, revision: main}", "only a hub id has revisions"),
        ("{name: x, path: 'pypi:a==1'}", "an adapter is a folder or a hub id."),
        ("{name: x, path: org/x/y.gguf}", "an adapter is a folder or a hub id."),
        ("{name: m, path: ./x}", "'m' is taken by models[0].name on line 3."),
        ("{name: other, path: ./x}", "'other' is taken by models[0].aliases[0] on line 6."),
        ("{name: a b, path: ./x}", "a name begins with a letter or digit"),
        ("{nme: x, path: ./x}", "unknown key. Did you mean 'name'?"),
        ("{name: x}", "path"),
    ],
)
def test_what_is_wrong_is_named_by_line(tmp_path: Path, line: str, words: str) -> None:
    folder(tmp_path / "x")
    (tmp_path / "empty").mkdir()
    assert words in "\n".join(complaints(filed(tmp_path, line)))


def test_two_adapters_have_two_names(tmp_path: Path) -> None:
    folder(tmp_path / "x")
    path = filed(tmp_path, "{name: x, path: ./x}", "{name: x, path: ./x}")
    assert "'x' is taken by models[0].adapters[0].name" in complaints(path)[0]


def test_a_key_may_name_one(tmp_path: Path) -> None:
    folder(tmp_path / "x")
    keys = "    keys:\n      - {name: k, environment: K, models: [x]}\n"
    config = load_config(filed(tmp_path, "{name: x, path: ./x}", more=keys))
    assert config.keys[0].models == ("x",)


def test_a_model_over_several_gpus_has_none(tmp_path: Path) -> None:
    folder(tmp_path / "x")
    path = filed(tmp_path, "{name: x, path: ./x}")
    spread = path.read_text().replace(
        "engine: echo", "engine: transformers\n    gpus_per_replica: 2"
    )
    path.write_text(spread)
    told = "\n".join(complaints(path))
    assert "adapters: the engine transformers has none for a model with `gpus_per_replica`" in told


def test_an_engine_without_adapters_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "x")
    monkeypatch.setitem(KINDS, "echo", dataclasses.replace(KINDS["echo"], adapters=False))
    [told] = complaints(filed(tmp_path, "{name: x, path: ./x}"))
    assert told.endswith("models[0].adapters: the engine echo has no adapters.")
