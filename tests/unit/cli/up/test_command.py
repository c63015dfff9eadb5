"""`servekit up` before anything starts: its options, its port, and what it says of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cli.up import command
from servekit.errors import ConfigError
from tests.unit.cli.instance import invoke


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("SERVEKIT_PORT", "SERVEKIT_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "servekit.yaml"
    path.write_text("""
models: [{name: a, engine: echo}, {name: b, engine: echo}]
profiles: {night: [a]}
server: {port: 1}
""")
    return path


@pytest.mark.parametrize(
    ("text", "port"),
    [("", None), ("0", 0), ("65535", 65535), ("tcp://10.0.0.1:8000", None)],
)
def test_the_port_of_the_environment_is_a_number_or_kubernetes(text: str, port: int | None) -> None:
    assert command._read_port(text) == port


@pytest.mark.parametrize("text", ["65536", "-1", "8000 ", "http"])
def test_a_port_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        command._read_port(text)
    assert error.value.message == f"SERVEKIT_PORT is a number up to 65535, not {text!r}"


def test_a_port_of_the_environment_is_read_unless_one_is_given(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVEKIT_PORT", "x")
    done = invoke("up", config)
    assert (done.exit_code, "SERVEKIT_PORT is a number" in done.stderr) == (2, True)
    done = invoke("up", config, "--port", "1", "--profile", "none")
    assert done.exit_code == 2 and "SERVEKIT_PORT" not in done.stderr


def test_what_is_given_replaces_what_the_file_says(config: Path) -> None:
    plan = command.make_plan(command.make_source(config, "127.0.0.2", 0))
    assert (plan.config.server.host, plan.config.server.port) == ("127.0.0.2", 0)
    assert [model.name for model in plan.config.models] == ["a", "b"]
    plain = command.make_plan(command.make_source(config)).config.server
    assert (plain.host, plain.port) == ("127.0.0.1", 1)


def test_an_address_for_everybody_needs_keys_or_a_word(config: Path) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        command.make_plan(command.make_source(config, "0.0.0.0"))
    plan = command.make_plan(command.make_source(config, "0.0.0.0", insecure=True))
    assert plan.config.server.host == "0.0.0.0"


def test_a_profile_is_the_one_that_was_asked_for(config: Path) -> None:
    source = command.make_source(config, profile="night")
    assert (source.profile, source.asked_profile) == ("night", "night")
    assert {place.model for place in command.make_plan(source).places} == {"a"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--log-format", "xml"], "--log-format is pretty or json, not 'xml'\n"),
        (["--profile", "day"], "'day'"),
        (["--name", "x"], ""),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    config: Path, options: list[str], said: str
) -> None:
    done = invoke("up", config, *options)
    assert done.exit_code == 2
    assert said in done.stderr


def test_only_options_that_were_given_are_passed_on() -> None:
    flags = command._set_flags({"--host": None, "--port": 0, "--profile": "a b"})
    assert flags == ["--port", "0", "--profile", "a b"]


def test_the_command_that_stops_it_names_the_run_directory_if_it_has_to(tmp_path: Path) -> None:
    default = tmp_path / "state" / "servekit" / "default"
    assert command._down_command(default) == "servekit down"
    other = tmp_path / "my run"
    assert command._down_command(other) == f"servekit down --run-dir '{other}'"


def test_a_plan_of_local_models_needs_no_word(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.tell_fit(command.make_plan(command.make_source(config)))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
