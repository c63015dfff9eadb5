"""The help: groups of commands, whole sentences, and the words of other programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from servekit.cli.main import app


def run(*args: str, env: dict[str, str] | None = None) -> str:
    done = CliRunner().invoke(app, list(args), env=env, prog_name="servekit")
    assert done.exit_code == 0, done.output
    return done.output


def test_commands_stand_in_groups_in_whole_sentences() -> None:
    text = run("--help")
    groups = re.findall(r"^(\w[\w ]+):$", text, re.MULTILINE)
    assert groups == ["Options", "Serve", "Watch", "Models", "Prepare", "Measure and test"]
    assert "..." not in text.partition("Serve:")[2]


@pytest.mark.parametrize("args", [(), ("-h",), ("help",)])
def test_the_help_by_every_habit(args: tuple[str, ...]) -> None:
    assert run(*args) == run("--help")


def test_help_of_a_command() -> None:
    assert run("help", "why") == run("why", "--help") == run("why", "-h")
    assert run("help", "key", "new") == run("key", "new", "-h")


def test_arguments_are_words_without_braces() -> None:
    assert "Usage: servekit why [OPTIONS] MODEL[/N]" in run("why", "-h")
    assert "Usage: servekit adapter add [OPTIONS] NAME PATH" in run("adapter", "add", "-h")


def test_words_of_other_programs_are_hidden_aliases() -> None:
    for alias, command in {"serve": "up", "stop": "down", "status": "ps", "list": "ls"}.items():
        assert run(alias, "-h").split("\n\n")[1] == run(command, "-h").split("\n\n")[1]
        assert f"\n  {alias} " not in run("--help")
    assert run("version") == run("-V") == run("--version")


def test_the_environment_sets_options_but_not_the_version() -> None:
    env = {"SERVEKIT_SCHEMA_X": "1", "SERVEKIT_VERSION": "1"}
    assert run("metrics", env=env).startswith("|")
    assert "SERVEKIT_LOGS_TAIL" in run("logs", "-h")


def test_the_variable_of_an_option_has_the_word_that_is_typed(tmp_path: Path) -> None:
    """Not the name of the parameter, as `as_json` of `--json`."""
    env = {"SERVEKIT_KEY_LS_JSON": "1"}
    config = tmp_path / "servekit.yaml"
    config.write_text("models: [{name: echo, engine: echo}]")
    assert json.loads(run("key", "ls", "--config", str(config), env=env)) == []
    for command, word in {
        "ps": "JSON",
        "events": "TAIL",
        "init": "FROM",
        "trace-cuda": "IMPORT",
        "engine install": "WITH",
    }.items():
        prefix = command.upper().replace(" ", "_").replace("-", "_")
        assert re.search(rf"env var:\s+SERVEKIT_{prefix}_{word}[;\]]", run(*command.split(), "-h"))
