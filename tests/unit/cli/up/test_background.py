"""An instance in the background, here a shell that holds the lock of a run directory."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.cli.up import background
from servekit.cli.up.background import Background
from servekit.errors import StartError
from servekit.protocol.messages import Progress, Status
from servekit.supervisor.process import run_dir
from tests.unit.cli.instance import listening, make_model, make_replica, make_status

#: Opens the lock, writes the record with its PID, and stays until it is told to go.
_HOLD = """
exec 9<>"$1/lock"
printf "$2" $$ > "$1/supervisor.json"
echo held
exec sleep 600
"""


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is the supervisor of `folder`, as far as others can see."""
    fields = {"started_at": 1.0, "url": "http://a", "config": "f", "mark": "x", "boot": ""}
    record = '{"pid": %d, ' + json.dumps(fields)[1:]
    command = ["sh", "-c", _HOLD, "sh", str(folder), record]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "default.log"
    path.write_text("of a start before\n" + "".join(f"line {n}\n" for n in range(30)))
    return path


def test_a_start_that_fails_shows_the_end_of_its_own_part_of_the_log(log: Path) -> None:
    with subprocess.Popen(["sh", "-c", "exit 3"]) as process:
        process.wait()
    begin = len("of a start before\n")
    with pytest.raises(StartError) as error:
        Background(process, log, begin).until_started()
    *lines, last = error.value.message.splitlines()
    assert lines == [f"line {n}" for n in range(10, 30)]
    assert last == f"servekit has ended (3): {log}"
    with pytest.raises(StartError) as error:
        Background(process, log, log.stat().st_size).until_started()
    assert error.value.message == f"\nservekit has ended (3): {log}", "nothing of starts before"
    log.unlink()
    with pytest.raises(StartError, match=r"servekit has ended \(3\)"):
        Background(process, log).until_started()


def test_progress_is_told_until_all_serves(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_LOOK_EVERY_S", 0.01)

    def status(state: str, progress: Progress | None = None) -> Status:
        replica = replace(make_replica("m/0", state), progress=progress)  # type: ignore[arg-type]
        return make_status(make_model("m", replica))

    load = Progress("load", 1, 9, "tensors")
    further = replace(load, done=5)
    states = [status("starting"), status("loading", load), status("loading", further)]
    news = [*states, status("failed")]
    with holding(tmp_path) as process:
        instance = Background(process, log)
        found = instance.find_instance()
        assert found is not None and found.run_dir == tmp_path
        with listening(tmp_path, lambda message: None, lambda: news.pop(0)):
            done = instance.until_started()
    assert done == status("failed") and news == []
    told = capsys.readouterr().err.splitlines()
    assert told == ["m/0: starting", "m/0: load", "m/0: failed"], "each phase once"


def test_an_instance_that_does_not_listen_yet_is_waited_for(tmp_path: Path, log: Path) -> None:
    with holding(tmp_path) as process:
        assert Background(process, log)._read_status() is None
    assert Background(process, log).find_instance() is None


def test_stop_waits_until_it_is_gone(tmp_path: Path, log: Path) -> None:
    with holding(tmp_path) as process:
        Background(process, log).stop_instance()
        assert process.returncode == -15


def test_options_of_up_are_not_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        *("SERVEKIT_UP_NAME", "SERVEKIT_PORT", "SERVEKIT_HOST"),
        *("SERVEKIT_LOG_FORMAT", "SERVEKIT_PROFILE"),
    )
    for name in (*names, "SERVEKIT_API_KEY"):
        monkeypatch.setenv(name, "x")
    left = background._environment()
    assert not left.keys() & set(names)
    assert left["SERVEKIT_API_KEY"] == "x"


def test_the_log_is_beside_the_first_run_directory_that_allows_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused, good = tmp_path / "file" / "run", tmp_path / "new" / "default"
    path, output = background._open_first_log([refused, good, tmp_path / "other"])
    with output:
        output.write(b"first\n")
    assert path == tmp_path / "new" / "default.log"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    _, again = background._open_first_log([good])
    with again:
        assert again.tell() == len("first\n"), "it is appended to"
    with pytest.raises(StartError, match=r"cannot write the log .*/file/run\.log: "):
        background._open_first_log([refused, tmp_path / "file" / "other"])
    assert not (tmp_path / "other.log").exists()


def test_a_log_in_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    monkeypatch.setattr(run_dir, "_fallback_base", lambda: theirs)
    (tmp_path / "mine").mkdir()
    theirs.symlink_to(tmp_path / "mine")  # as somebody could have prepared it in /tmp
    with pytest.raises(StartError, match="is not a directory, or is a symbolic link"):
        background._open_first_log([theirs / "servekit" / "default"])


def test_what_is_started_gets_the_file_the_log_and_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ["sh", "-c", 'echo "$SERVEKIT_HOST" "$@"; cat', "sh"]
    monkeypatch.setattr(background, "module_command", lambda module: program)
    monkeypatch.setenv("SERVEKIT_HOST", "10.0.0.7")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder, config = tmp_path / "run", tmp_path / "servekit.yaml"
    (tmp_path / "run.log").write_text("of a start before\n")
    given = Background.start(config, folder, ["--port", "0"])
    assert given.process.wait() == 0, "its input is empty"
    assert given.log == tmp_path / "run.log"
    words = f"up --config {config} --log-file {given.log} --port 0 --run-dir {folder}"
    assert given._last_lines() == f" {words}"
    default = Background.start(config, None)
    assert default.process.wait() == 0
    assert default.log == tmp_path / "state" / "servekit" / "default.log"
    assert default._last_lines() == f" up --config {config} --log-file {default.log}"
