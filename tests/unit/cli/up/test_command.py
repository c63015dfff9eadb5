"""`servekit up` before anything starts: its options, its port, and what it says of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from servekit.cli.up import command
from servekit.cli.up.background import Background
from servekit.errors import ConfigError
from servekit.protocol.messages import WorkerState
from tests.unit.cli.instance import invoke, listening, make_model, make_replica, make_status
from tests.unit.cli.up.test_background import holding


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


# ---------------------------------------------------------------- in the background


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[Path, Path | None, Sequence[str]]]]:
    """What was to be started; a process that holds a run directory is the instance."""
    asked: list[tuple[Path, Path | None, Sequence[str]]] = []
    folder = tmp_path / "run"
    folder.mkdir()
    with holding(folder) as process:

        def start(path: Path, run_dir: Path | None, flags: Sequence[str]) -> Background:
            asked.append((path, run_dir, flags))
            return Background(process, tmp_path / "log")

        monkeypatch.setattr(Background, "start", start)
        yield asked


@pytest.mark.parametrize(("state", "code"), [("ready", 0), ("failed", 1)])
def test_the_exit_code_says_whether_all_models_serve(
    config: Path, tmp_path: Path, started: list[object], state: WorkerState, code: int
) -> None:
    run_dir = tmp_path / "run"
    status = make_status(make_model("a", make_replica("a/0", state)))
    with listening(run_dir, lambda message: None, status):
        done = invoke("up", config, "-d", "--port", "7", "--profile", "night", run_dir=run_dir)
    assert done.exit_code == code, done.stderr
    assert started == [(config, run_dir, ["--port", "7", "--profile", "night"])]
    assert f"servekit down --run-dir {run_dir}" in done.stdout


def test_flags_are_passed_on(config: Path, tmp_path: Path, started: list[object]) -> None:
    run_dir = tmp_path / "run"
    flags = ["--insecure", "--quiet", "--host", "127.0.0.2", "--log-format", "json"]
    with listening(run_dir, lambda message: None):
        done = invoke("up", config, "-d", *flags, run_dir=run_dir)
    assert done.exit_code == 0, done.stderr
    assert started == [(config, run_dir, flags)]


def test_a_profile_that_was_switched_to_is_in_force_again(
    config: Path, tmp_path: Path, started: list[object]
) -> None:
    run_dir = tmp_path / "run"
    for written, told in (
        ('["", "night"]', "the profile is night again, as before\n"),
        ('["", "gone"]', ""),
        ('["night", ""]', ""),
    ):
        (run_dir / "profile.json").write_text(written)
        with listening(run_dir, lambda message: None):
            done = invoke("up", config, "-d", run_dir=run_dir)
        assert (done.exit_code, done.stderr.replace("m/0: ready\n", "")) == (0, told)
    (run_dir / "profile.json").write_text('["night", ""]')
    with listening(run_dir, lambda message: None):
        done = invoke("up", config, "-d", "--profile", "night", run_dir=run_dir)
    assert "the profile is all again, as before\n" in done.stderr


def test_ctrl_c_leaves_the_instance_alone(
    config: Path, tmp_path: Path, started: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(instance: Background) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Background, "until_started", interrupt)
    done = invoke("up", config, "-d", run_dir=tmp_path / "run")
    assert done.exit_code == 130
    assert "goes on in the background; its log: " in done.stderr
