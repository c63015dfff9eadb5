"""Commands of `cli.main`, and what becomes of errors: a sentence, and an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from msgspec.structs import replace

from servekit import __version__
from servekit.cli import main
from servekit.errors import ConfigError, ServekitError, StartError
from servekit.protocol.control.startup_messages import Phase, Start, Starts
from servekit.protocol.messages import Accepted, Refused, Reload
from tests.unit.cli.instance import invoke, listening, make_model, make_replica, make_status
from tests.unit.cli.up.test_background import holding


def raising(error: BaseException) -> Callable[[], None]:
    @main._one_sentence()
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("wrong"), 2, "wrong\n"),
        (StartError("busy"), 1, "busy\n"),
        (ServekitError("odd"), 1, "odd\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied\n"),
        (OSError(36, "File name too long", "/x"), 1, "/x: File name too long\n"),
        (OSError(28, "No space left"), 1, "the output cannot be written: No space left\n"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "no"), 2, "'\\udcff' is not UTF-8\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_a_sentence_and_a_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as exit_:
        raising(error)()
    assert (exit_.value.exit_code, capsys.readouterr().err) == (code, said)


def test_a_working_directory_that_is_gone_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in (["check", "servekit.yaml"], ["up", "./model"]):
        done = invoke(*words)
        said = "the working directory does not exist any more; change to another one\n"
        assert (done.exit_code, done.stderr) == (1, said), words


@pytest.mark.parametrize(
    "error",
    [PermissionError(1, "not permitted"), FileNotFoundError(2, "no", "/x"), ValueError("a fault")],
)
def test_a_fault_of_ours_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        raising(error)()


def test_without_a_command_there_is_help_and_a_version_has_three_names() -> None:
    assert "Serve your own models on your own GPUs" in invoke().stdout
    for words in (["--version"], ["-V"], ["version"]):
        done = invoke(*words)
        assert (done.exit_code, done.stdout) == (0, f"servekit {__version__}\n")


# ---------------------------------------------------------------- check


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "servekit.yaml"
    path.write_text("models: [{name: a, engine: echo}]\nprofiles: {night: [a]}\n")
    return path


def test_check_shows_what_would_run(config: Path) -> None:
    for words in (["check", config], ["check", "-c", config]):
        done = invoke(*words)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.splitlines()[1].split()[:2] == ["a/0", "echo"]


def test_check_looks_for_the_file_where_up_does(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERVEKIT_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    monkeypatch.chdir(config.parent)
    assert "a/0" in invoke("check").stdout
    monkeypatch.chdir("/")
    done = invoke("check")
    assert done.exit_code == 2 and "servekit.yaml" in done.stderr


def test_check_checks_each_profile_unless_one_is_named(config: Path) -> None:
    config.write_text("""
models:
  - {name: a, engine: echo, replicas: 1}
  - {name: b, engine: echo}
profiles: {night: [a], day: [b]}
""")
    assert invoke("check", config).exit_code == 0
    done = invoke("check", config, "--profile", "night")
    assert "a/0" in done.stdout and "b/0" not in done.stdout
    assert invoke("check", config, "--profile", "noon").exit_code == 2


def test_check_ends_with_2_where_a_path_is_wrong(config: Path) -> None:
    config.write_text("models: [{name: a, engine: transformers, path: /nowhere, device: cpu}]")
    done = invoke("check", config)
    assert done.exit_code == 2
    assert "/nowhere: does not exist" in done.stderr


# ---------------------------------------------------------------- ps, reload, down


def test_ps_shows_the_processes_as_a_table_or_json(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: None):
        table = invoke("ps", run_dir=tmp_path)
        as_json = invoke("status", "--json", run_dir=tmp_path)
    assert "gateway/0" in table.stdout and table.stderr == ""
    assert json.loads(as_json.stdout)["models"][0]["name"] == "m"


def test_ps_ready_is_silent_or_says_what_lacks(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: None):
        done = invoke("ps", "--ready", run_dir=tmp_path)
    assert (done.exit_code, done.output) == (0, "")
    ill = make_status(make_model("m", replace(make_replica("m/0", "failed"), reason="no folder")))
    with listening(tmp_path, lambda message: None, ill):
        done = invoke("ps", "--ready", run_dir=tmp_path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "no folder" in done.stderr


def test_ps_timings_shows_the_phases_of_starts(tmp_path: Path) -> None:
    start = Start("up", 1.0, "up", (Phase("import", 0.0, 1.5),), 1.5)
    status = replace(make_status(), starts=(Starts("m/0", (start,)),))
    with listening(tmp_path, lambda message: None, status):
        done = invoke("ps", "--timings", run_dir=tmp_path)
    assert "import" in done.stdout and "RESTARTS" not in done.stdout


def test_other_instances_are_told_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with holding(tmp_path) as process:
        main._tell_others(-1)
        told = capsys.readouterr().err
        assert told.startswith("Other running instances:\n")
        assert f"--run-dir {tmp_path}  (pid {process.pid}, http://a, f)" in told
        main._tell_others(process.pid)
        assert str(tmp_path) not in capsys.readouterr().err


def test_reload_prints_what_will_be_done_or_why_not(tmp_path: Path) -> None:
    with listening(tmp_path, lambda message: Accepted("a: added")) as heard:
        done = invoke("reload", run_dir=tmp_path)
    assert (done.exit_code, done.stdout, heard) == (0, "a: added\n", [Reload()])
    with listening(tmp_path, lambda message: Refused("the file is wrong", invalid=True)):
        done = invoke("reload", run_dir=tmp_path)
    assert (done.exit_code, done.stderr) == (2, "the file is wrong\n")


def test_down_needs_an_instance(tmp_path: Path) -> None:
    done = invoke("stop", run_dir=tmp_path)
    assert done.exit_code == 1
    assert f"no servekit runs in {tmp_path}" in done.stderr


# ---------------------------------------------------------------- chaos, schema, metrics


def test_chaos_asks_before_it_kills(tmp_path: Path) -> None:
    done = invoke("chaos", run_dir=tmp_path, typed="n\n")
    assert done.exit_code == 1
    assert f"Kill and stop processes of the instance in {tmp_path}?" in done.stdout
    done = invoke("chaos", "--only", " no-such ,", "--yes", run_dir=tmp_path)
    assert done.exit_code == 2
    assert "there is no experiment 'no-such'; there are: " in done.stderr


def test_the_schema_and_the_metrics_are_printed() -> None:
    assert "models" in json.loads(invoke("schema").stdout)["properties"]
    assert "| `servekit_requests_total` |" in invoke("metrics").stdout


#: Runs what follows without root's right to read every folder.
AS_A_USER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("engine", "list"), 0, ""),
        (("key", "ls"), 2, "no configuration: neither ./servekit.yaml nor "),
    ],
)
def test_a_home_of_another_user_holds_nothing(
    tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    (home := tmp_path / "home").mkdir(mode=0o000)
    environ = {"HOME": str(home), "PATH": os.environ["PATH"]}
    command = [*(AS_A_USER if os.getuid() == 0 else ()), sys.executable, "-m", "servekit", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    home.chmod(0o700)


def test_ctrl_c_during_the_imports_is_silent(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("print('importing', flush=True)\ninput()\n")
    with subprocess.Popen(
        [sys.executable, "-m", "servekit", "ps"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (-signal.SIGINT, b"")


@pytest.mark.parametrize("words", [("engine", "list"), ("key", "ls"), ("ls",)])
def test_a_user_without_a_home_is_told_to_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "~")  # as it is found where there is neither HOME nor a user
    done = invoke(*words)
    assert (done.exit_code, done.stderr) == (
        1,
        f"user {os.getuid()} has no home directory: set HOME\n",
    )
