"""llama-swap's file as llama-swap reads it: macros, variables and commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from servekit.cli.init.llama_swap_file import SwapFile, read_file, split_command, variable_of
from servekit.errors import ConfigError


def read(tmp_path: Path, text: str, **environ: str) -> SwapFile:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return read_file(path, environ)


def model(tmp_path: Path, text: str, **environ: str) -> Any:
    [found] = read(tmp_path, text, **environ).models.values()
    return found


def test_a_text_that_is_a_macro_becomes_its_content(tmp_path: Path) -> None:
    text = """
macros: {context: 4096, ratio: 0.5, whole: 2.0, swap: true, names: [x, y]}
models:
  m:
    cmd: "serve ${context} ${ratio} ${whole} ${swap}"
    ttl: ${context}
    aliases: ${names}
    metadata: {deep: ["${swap}", {"${context}": "a${whole}"}]}
"""
    found = model(tmp_path, text)
    assert found["cmd"] == "serve 4096 0.5 2 true", "numbers and words as llama-swap writes them"
    assert found["ttl"] == 4096 and found["aliases"] == ["x", "y"]
    assert found["metadata"] == {"deep": [True, {"4096": "a2"}]}


def test_a_models_macros_go_before_the_files_and_later_ones_may_use_earlier(
    tmp_path: Path,
) -> None:
    text = """
macros: {root: /models, file: "${root}/${MODEL_ID}.gguf", port: "1"}
models:
  m: {macros: {root: /own}, cmd: "serve ${file} ${PORT} ${PID}"}
"""
    assert model(tmp_path, text)["cmd"] == "serve /own/m.gguf ${PORT} ${PID}"
    assert "macros" not in model(tmp_path, text)


def test_variables_are_read_and_noted(tmp_path: Path) -> None:
    text = 'models: {m: {cmd: "serve ${env.ROOT}/m", env: ["A=${env.KEY}"]}}'
    file = read(tmp_path, text, ROOT="/models", KEY="secret", OTHER="x")
    assert file.models["m"]["cmd"] == "serve /models/m"
    assert file.models["m"]["env"] == ["A=secret"]
    assert file.used == {"ROOT", "KEY"}
    with pytest.raises(ConfigError, match="the variable ROOT is not set, and llama-swap would not"):
        _ = read(tmp_path, text, KEY="secret").models


def test_values_of_no_model_keep_their_variables(tmp_path: Path) -> None:
    file = read(tmp_path, "{macros: {a: 1}, models: {m: {cmd: x}}}", KEY="secret")
    assert file.expand(["${a}", "${env.KEY}", "b${a}"]) == [1, "${env.KEY}", "b1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "has no models; is it llama-swap's file?"),
        ("models: {}", "has no models; is it llama-swap's file?"),
        ("models: [m]", "has no models; is it llama-swap's file?"),
        ("models: {m: {}}", "models.m has no `cmd`, so nothing starts it"),
        ("models: {m: {cmd: 7}}", "models.m has no `cmd`, so nothing starts it"),
        ("models: {m: x}", "models.m has no `cmd`, so nothing starts it"),
        ('models: {m: {cmd: "${none}"}}', "models.m.cmd: there is no macro ${none}"),
        ('models: {m: {cmd: x, a: {b: "${no-ne}"}}}', "models.m.a.b: there is no macro ${no-ne}"),
        ("models: {m: {cmd: x, ttl: soon}}", "models.m.ttl has to be a whole number"),
        ("models: {m: {cmd: x, aliases: a}}", "models.m.aliases has to be a list"),
        ("models: {m: {cmd: x, proxy: 7}}", "models.m.proxy has to be text"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        _ = read(tmp_path, text).models
    assert error.value.message == f"{tmp_path}/config.yaml: {said}"


def test_a_macro_in_a_comment_is_none(tmp_path: Path) -> None:
    text = "models:\n  m:\n    cmd: |\n      # with ${none}\n      serve\n"
    assert model(tmp_path, text)["cmd"] == "serve"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serve -m 'a b'", ["serve", "-m", "a b"]),
        ("serve \\\n  --port 1\n", ["serve", "--port", "1"]),
        ("# a comment\nserve\n  # another\n-x", ["serve", "-x"]),
        ("serve\n--port\n1", ["serve", "--port", "1"]),
        ("serve \\\n# between\n -x", ["serve", "-x"]),
    ],
)
def test_a_command_is_split_as_llama_swap_does(text: str, words: list[str]) -> None:
    assert split_command(text) == words


@pytest.mark.parametrize("text", ["", "# only a comment", "serve 'open"])
def test_a_command_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it is empty|No closing quotation"):
        split_command(text)


def test_a_value_may_be_one_variable() -> None:
    assert variable_of("${env.KEY}") == "KEY"
    for other in ("a${env.KEY}", "${env.KEY} ", "${KEY}", 7, None):
        assert variable_of(other) == ""
