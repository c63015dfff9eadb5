"""The commands of a first day: serve in the background, list, restart, chat, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from servekit.supervisor.process.instances import list_instances
from servekit.system import procfs
from tests.integration.instance import PROGRAM, echo, write_config
from tests.polling import poll


def cli(folder: Path, *args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "SERVEKIT_UP_NAME": ""}
    return subprocess.run(
        [*PROGRAM, *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        cwd=folder,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An instance in the background, of the servekit.yaml that lies there."""
    there = tmp_path_factory.mktemp("first")
    models = [{**echo("a", replicas=2), "sampling": {"max_tokens": 4}}]
    write_config(there, [*models, {**echo("b"), "load": "manual"}])
    done = cli(there, "up", "-d")
    assert done.returncode == 0, done.stderr
    assert "default.log" in done.stdout
    yield there
    process = procfs.read_process(json.loads(cli(there, "ps", "--json").stdout)["pid"])
    assert process is not None
    assert cli(there, "stop").returncode == 0
    assert not procfs.is_alive(process.pid, process.started)


def test_where_no_state_is_kept_the_log_is_beside_the_other_run_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # sockets have short paths there
        folder = Path(name)
        (folder / "state").touch()  # no directory can be made below a file, whoever we are
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        write_config(folder, [echo("a")])
        done = cli(folder, "up", "-d")
        try:
            assert f"{name}/servekit/default.log" in done.stdout, done.stderr
        finally:
            assert cli(folder, "stop", "--run-dir", f"{name}/servekit/default").returncode == 0


def workers(folder: Path) -> dict[str, int]:
    models = json.loads(cli(folder, "status", "--json").stdout)["models"]
    return {one["name"]: one["pid"] for one in models[0]["replicas"]}


def test_a_second_one_says_who_is_there(folder: Path) -> None:
    done = cli(folder, "up", "-d")
    assert done.returncode == 1
    assert "is in use by pid" in done.stderr
    assert "default.log" in done.stderr


def test_ls_has_models_with_their_states(folder: Path) -> None:
    rows = json.loads(cli(folder, "ls", "--json").stdout)
    states = {row["name"]: (row["state"], row["engine"]) for row in rows if row["name"]}
    assert states == {"a": ("ready", "echo"), "b": ("stopped", "echo")}


def test_chat_takes_the_first_model(folder: Path) -> None:
    done = cli(folder, "chat", text="hello")
    assert done.returncode == 0
    assert done.stdout == "hell\n"
    assert done.stderr == "a, of a, b\n"


@pytest.mark.lane("long")
def test_restart_replaces_all_workers_or_one(folder: Path) -> None:
    before = workers(folder)
    done = cli(folder, "restart", "a")
    assert done.stdout.startswith("a is restarted after")
    after = workers(folder)
    assert len(after) == 2
    assert not set(after.values()) & set(before.values())
    one, other = after
    assert cli(folder, "restart", one).returncode == 0
    last = workers(folder)
    assert last[other] == after[other]
    assert after[one] not in last.values()


def test_restart_refuses_what_is_not_there(folder: Path) -> None:
    done = cli(folder, "restart", "a/77")
    assert done.returncode == 2
    assert "there are: a, b, a/" in done.stderr
    assert "is not loaded" in cli(folder, "restart", "b").stderr


@pytest.mark.lane("long")
def test_logs_of_a_model_since_a_time(folder: Path) -> None:
    assert "started" in cli(folder, "logs", "a", "--since", "1h").stdout
    assert cli(folder, "logs", "a", "--since", "0.001s").stdout == ""
    assert "is not a duration" in cli(folder, "logs", "a", "--since", "soon").stderr
    assert "not both" in cli(folder, "logs", "a", "-w", "b").stderr


@pytest.mark.lane("long")
def test_a_start_that_fails_says_why_and_where_the_log_is(tmp_path: Path) -> None:
    config = write_config(tmp_path, [echo("bad", load_error="no weights here")])
    done = cli(tmp_path, "up", str(config), "-d")
    assert done.returncode == 1
    assert "no weights here" in done.stderr
    assert "state/servekit/default.log" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_the_instance_of_a_conversation_ends_with_it(
    tmp_path: Path, short: Path, number: signal.Signals
) -> None:
    """As where its terminal is closed."""
    command = [*PROGRAM, "run", "org/name", "--engine", "echo"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(short)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env
    ) as process:

        def instances() -> list[Path]:
            return [one.run_dir for one in list_instances() if short in one.run_dir.parents]

        poll("it serves", instances)
        process.send_signal(number)
        poll("it is gone", lambda: not instances() and process.poll() is not None)
        said = process.stderr.read().decode() if process.stderr is not None else ""
    assert "Traceback" not in said
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    left = list(short.glob("servekit-run-*"))
    assert left == [] or number == signal.SIGKILL


@pytest.mark.lane("long")
def test_run_serves_a_model_for_one_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 20)  # as on clusters; no socket has a path there
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    done = cli(tmp_path, "run", "org/name", "--engine", "echo", text="x" * 8000)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("xxx")
    assert not [one for one in list_instances() if "servekit-run-" in str(one.run_dir)]
