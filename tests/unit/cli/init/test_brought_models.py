"""The file that is written for models of other programs, as servekit reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servekit.cli.init.brought_models import (
    BroughtModel,
    Command,
    compose_file,
    left_out_lines,
    name_models,
    require_models,
)
from servekit.config.load import load_config
from servekit.errors import ConfigError

_WORD = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc", "Cn", "Co", "Zl", "Zp"])
)


def command_of(folder: Path, words: list[str]) -> list[str]:
    """What servekit reads where a command of `words` is written."""
    path = folder / "x.yaml"
    options = {"command": Command([*words, "{port}"])}
    model = BroughtModel("m", {"name": "m", "engine": "command", "options": options})
    path.write_text(compose_file(["Made."], [model], {"server": {"port": 1}}), encoding="utf-8")
    read: list[str] = load_config(path).models[0].options["command"]
    return read


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(words=st.lists(_WORD.filter(lambda word: "{" not in word), min_size=1, max_size=12))
def test_any_command_is_read_as_it_was(tmp_path: Path, words: list[str]) -> None:
    read = command_of(tmp_path, ["serve", *words])
    assert read == ["serve", *words, "{port}"]


def test_a_command_is_for_people_to_edit(tmp_path: Path) -> None:
    command_of(tmp_path, ["serve", "-m", "/a b/c.gguf", "--kwargs", '{"a": 1}', "--x=y", "z" * 90])
    text = (tmp_path / "x.yaml").read_text()
    assert "-m '/a b/c.gguf'\n" in text and "--kwargs '{\"a\": 1}'\n" in text
    assert max(map(len, text.splitlines())) < 110


def test_names_are_valid_and_differ() -> None:
    names = ["a b", "a-b", "Qwen3 (8B)", "é", "org/name:Q4"]
    aliases = ["x", "a-b", "bad name"]
    models = [BroughtModel(name, {"engine": "echo", "aliases": aliases}) for name in names]
    name_models(models)
    assert [m.keys["name"] for m in models] == ["a-b", "a-b-2", "Qwen3-8B", "model", "org/name:Q4"]
    assert models[0].keys["aliases"] == ["x"] and "aliases" not in models[1].keys
    said = "\n".join(left_out_lines(models, ["whole"]))
    assert said.startswith("whole\na b: its name cannot be one here; requests ask for a-b")
    assert "a-b: alias 'x': it is taken" in said and "alias 'bad name'" in said


def test_nothing_to_serve_is_an_error() -> None:
    with pytest.raises(ConfigError, match="none of the models of f can be brought:\na: because"):
        require_models([BroughtModel("a", notes=["because"])], "f")
