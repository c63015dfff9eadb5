"""What an operator types: events, logs, top, chat, init and completion, against a real instance."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.event_store import FILE, EventFilter, newest_events
from tests.integration.instance import PROGRAM, Instance, echo
from tests.integration.test_terminal import Terminal

EVIL = "no \x1b[2J\x1b]0;owned\x07weights"
LEAVES_SCREEN, ENTERS_SCREEN = "\x1b[?1049l", "\x1b[?1049h"


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    folder = tmp_path_factory.mktemp("operating")
    models = [
        {**echo("a", replicas=2, step_s=0.02), "aliases": ["alpha"]},
        {**echo("b"), "load": "on_demand"},
        echo("bad", load_error="no weights"),
    ]
    with Instance.up(folder, models) as running:
        running.until_settled()
        yield running


def cli(
    instance: Instance, *args: str, env: dict[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SERVEKIT_RUN_DIR": str(instance.run_dir), **(env or {})},
        check=False,
        **more,
    )


@contextlib.contextmanager
def terminal(folder: Path, instance: Instance, *args: str) -> Iterator[Terminal]:
    env = {"SERVEKIT_RUN_DIR": str(instance.run_dir), "XDG_STATE_HOME": str(folder)}
    # without these the size is the terminal's own
    made = Terminal(list(args), {**env, "COLUMNS": "", "LINES": ""})
    try:
        yield made
    finally:
        made.close()


def kill(instance: Instance, name: str) -> int:
    pid = instance.replica(name).pid
    os.kill(pid, signal.SIGKILL)
    instance.until(f"{name} is back", lambda: back(instance, name, pid))
    return pid


def back(instance: Instance, name: str, than: int) -> bool:
    replica = instance.replica(name)
    return replica.state == "ready" and replica.pid != than


# ---------------------------------------------------------------- events, why, ps


def test_events_of_a_death_a_reload_and_a_load(instance: Instance) -> None:
    pid = kill(instance, "a/0")
    assert cli(instance, "reload").returncode == 0
    assert cli(instance, "load", "b").returncode == 0
    assert cli(instance, "unload", "b").returncode == 0
    found = [json.loads(line) for line in cli(instance, "events", "--json").stdout.splitlines()]
    assert [*found[0]] == ["id", "at", "kind", "model", "worker", "what", "detail"]
    assert found[0]["kind"] == "up" and found[0]["detail"]["pid"] == instance.pid
    [death] = [one for one in found if one["kind"] == "exit" and one["worker"] == "a/0"]
    assert death["what"] == "killed by SIGKILL" and death["detail"]["pid"] == pid
    assert any(one["kind"] == "reload" for one in found)
    of_b = [one["kind"] for one in found if one["model"] == "b"]
    assert of_b == ["load", "started", "ready", "unload", "stopped"]
    shown = cli(instance, "events", "--model", "bad", "--since", "1h").stdout
    assert "no weights, lived" in shown and "\x1b" not in shown
    assert cli(instance, "events", "--since", "1").stdout.count("\n") <= 12


def test_events_are_followed(instance: Instance) -> None:
    command = [*PROGRAM, "events", "-f", "-n", "1", "--worker", "a/1"]
    following = subprocess.Popen(
        [*command, "--run-dir", str(instance.run_dir)], stdout=subprocess.PIPE, text=True
    )
    assert following.stdout is not None
    try:
        assert following.stdout.readline(), "the last event: it has begun"
        kill(instance, "a/1")
        lines = [following.stdout.readline() for _ in range(3)]
    finally:
        following.kill()
        following.wait()
    assert [line.split()[2] for line in lines] == ["exit", "started", "ready"]


@pytest.mark.lane("long")
def test_what_goes_wrong_is_a_sentence_with_the_next_step(instance: Instance) -> None:
    for args, words in (
        (("logs", "--worker", "nobody"), "there are logs of: gateway/0"),
        (("top", "--run-dir", "/tmp"), "no servekit runs in /tmp"),
        (("logs", "--follow", "--worker", "badd"), "did you mean 'bad'?"),
        (("why", "badd"), "did you mean 'bad'?"),
        (("load", "badd"), "did you mean 'bad'?"),
        (("chat", "nobody"), "the models are: a, b, bad, alpha"),
        (("chat", "a", "--api-key", "NO_SUCH_VARIABLE"), "name of an environment variable"),
    ):
        done = cli(instance, *args, input="hi")
        assert done.returncode in (1, 2), args
        assert words in done.stderr and done.stderr.count("\n") == 1, done.stderr


#: Fields that programs read of `ps --json`; fields are only ever added.
SHAPE = {
    "": "version pid url config started_at rss_bytes models gateways draining starts gpus traffic",
    "models": "name engine path created replicas info aliases adapters standbys residence scale",
    "replicas": "name state pid device gpus progress reason restarts running waiting rss_bytes "
    "gpu_bytes timings_s stray claim_bytes excess kv_used trouble held_bytes",
    "gateways": "name pid state restarts rss_bytes requests in_flight",
    "traffic": "model queued tokens",
}


def test_ps_for_programs_keeps_its_shape(instance: Instance) -> None:
    found = json.loads(cli(instance, "ps", "--json").stdout)
    parts = {
        "": found,
        "models": found["models"][0],
        "replicas": found["models"][0]["replicas"][0],
        "gateways": found["gateways"][0],
        "traffic": found["traffic"][0],
    }
    for part, keys in SHAPE.items():
        assert set(keys.split()) <= set(parts[part]), part


# ---------------------------------------------------------------- logs


@pytest.mark.lane("long")
def test_logs_are_shown_and_followed_and_move_no_cursor(instance: Instance, tmp_path: Path) -> None:
    path = instance.run_dir / "logs" / "a~0.log"
    with path.open("ab") as file:
        file.write(f"{EVIL}\n".encode() + b"x" * 2**18 + b"\nlast\n")
    done = cli(instance, "logs", "--worker", "a", "-n", "3")
    assert done.stdout.splitlines()[::2] == ["a/0 | no weights", "a/0 | last"]
    assert len(done.stdout) < 10_000
    assert cli(instance, "logs", "--model", "alpha", "-n", "3").stdout == done.stdout
    assert "gateway/0 | " in cli(instance, "logs").stdout
    with terminal(tmp_path, instance, "logs", "-f", "-n", "1", "--worker", "a/0") as shown:
        shown.until("last")
        with path.open("ab") as file:
            file.write(f"more {EVIL}\n".encode())
        shown.until("more no weights")
        assert "\x1b[2J" not in shown.raw and "\x1b]0" not in shown.raw
        shown.type("\x03")
        assert shown.wait() == 130


# ---------------------------------------------------------------- top


def frame(shown: Terminal) -> list[str]:
    """The lines of the last picture."""
    last = shown.raw.rpartition("\x1b[H")[2].partition(LEAVES_SCREEN)[0]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in last.split("\r\n")]


def resize(shown: Terminal, rows: int, columns: int) -> None:
    fcntl.ioctl(shown._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def until(shown: Terminal, what: str, seen: Any, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < deadline, f"{what}, not in:\n" + "\n".join(frame(shown))
        shown._read(0.1)


def test_top_shows_load_a_death_and_another_size(instance: Instance, tmp_path: Path) -> None:
    with terminal(tmp_path, instance, "top", "--every", "0.3") as shown:
        resize(shown, 24, 80)
        until(shown, "all of it", lambda: sized(frame(shown), 24, 80))
        with httpx.Client(base_url=instance.url, timeout=30) as client:
            body = {"model": "a", "prompt": "hello", "max_tokens": 200, "stream": True}
            with client.stream("POST", "/v1/completions", json=body):
                until(shown, "a rate", lambda: rate_of(frame(shown), "a") > 5)
        kill(instance, "a/0")
        until(shown, "its death", lambda: any("killed by SIGKILL" in one for one in frame(shown)))
        resize(shown, 12, 50)
        until(shown, "the new size", lambda: sized(frame(shown), 12, 50))
        assert "\x1b[2J\x1b]0" not in shown.raw and "owned" not in shown.raw
        shown.type("xyq")
        assert shown.wait() == 0
    assert shown.raw.count(ENTERS_SCREEN) == shown.raw.count(LEAVES_SCREEN) == 1
    assert shown.raw.rindex("\x1b[?25h") > shown.raw.rindex("\x1b[?25l"), "cursor is back"
    assert "Traceback" not in shown.text


def test_top_leaves_the_screen_to_the_shell_on_ctrl_z(instance: Instance, tmp_path: Path) -> None:
    with terminal(tmp_path, instance, "top") as shown:
        shown.until("q quit")
        # there is no shell here, so that the kernel lets it go on at once
        shown.type("\x1a")
        until(shown, "it is back", lambda: shown.raw.count(ENTERS_SCREEN) == 2)
        assert shown.raw.count(LEAVES_SCREEN) == 1
        assert "\x1b[?25h" in shown.raw.rpartition(ENTERS_SCREEN)[0], "with a cursor"
        shown.type("q")
        assert shown.wait() == 0


def sized(lines: list[str], rows: int, columns: int) -> bool:
    return len(lines) == rows and max(map(len, lines)) <= columns and "q quit" in lines[-1]


def rate_of(lines: list[str], model: str) -> float:
    [row] = [line.split() for line in lines if line.split()[:1] == [model]] or [[]]
    with contextlib.suppress(ValueError, IndexError):
        return float(row[row.index("ready") + 5])
    return 0.0


def test_top_prints_once_where_there_is_no_terminal(instance: Instance) -> None:
    done = cli(instance, "top")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("servekit ") and "\x1b" not in done.stdout
    assert re.search(r"^  a/0 +ready", done.stdout, re.MULTILINE)
    assert "q quit" not in done.stdout


# ---------------------------------------------------------------- chat


def test_a_chat_in_a_terminal(instance: Instance, tmp_path: Path) -> None:
    with terminal(tmp_path, instance, "chat", "alpha", "--max-tokens", "5000") as shown:
        shown.until(">>> ")
        shown.type("what \x16\x1b[31mis\n")  # Ctrl-V: the escape is typed, not read
        shown.until("␛[31miswhat ␛[31mis")
        shown.type("\x03")
        shown.until(" …")
        instance.until("its worker is free", lambda: not busy(instance))
        shown.type("b\udcffd\n")  # a byte that is not UTF-8
        shown.until("b\ufffddb\ufffdd")
        shown.type("\x03")
        instance.until("its worker is free", lambda: not busy(instance))
        shown.type("/help\n")
        shown.until("Ctrl-D quits;")
        shown.type("/system be kind\n/system\n")
        shown.until("new chat")
        shown.until("be kind\r\n>>>")
        shown.type("/nothing\n")
        # Ctrl-D is read as such once the prompt is there; before, it is the terminal's own
        shown.until("there is no /nothing; /help lists the commands\r\n>>> ")
        shown.type("\x04")
        assert shown.wait() == 0
    assert "Traceback" not in shown.text
    kept = tmp_path / "servekit" / "chat_history"
    assert "/system be kind" in kept.read_text(errors="replace")
    assert kept.stat().st_mode & 0o777 == 0o600


def busy(instance: Instance) -> bool:
    return any(gateway.in_flight for gateway in instance.status().gateways)


@pytest.mark.lane("long")
def test_one_question_by_a_pipe_and_by_url(instance: Instance) -> None:
    args = ("chat", "a", "--max-tokens", "4", "--temperature", "0")
    done = cli(instance, *args, input="abcdef")
    assert (done.returncode, done.stdout) == (0, "abcd\n"), done.stderr
    done = cli(instance, *args, "--url", f"{instance.url}/v1/", input="abcdef")
    assert (done.returncode, done.stdout) == (0, "abcd\n"), done.stderr
    assert "no question" in cli(instance, *args, input=" \n").stderr


# ---------------------------------------------------------------- completion, init


@pytest.mark.lane("long")
def test_names_are_completed_from_the_running_instance(instance: Instance) -> None:
    def completed(line: str, **env: str) -> list[str]:
        asked = {"_SERVEKIT_COMPLETE": "complete_bash", "COMP_WORDS": line}
        return cli(
            instance, env={**asked, "COMP_CWORD": str(line.count(" ")), **env}
        ).stdout.split()

    assert {"events", "logs", "top", "chat"} <= set(completed("servekit "))
    assert completed("servekit chat al") == ["alpha"]
    assert (
        completed("servekit logs --worker a/")
        == ["a/0", "a/1", "a/standby-0"][: len(completed("servekit logs --worker a/"))]
    )
    assert completed("servekit why ", SERVEKIT_RUN_DIR="/nonexistent") == []


@pytest.mark.lane("long")
def test_a_file_is_made_by_answering_questions(instance: Instance, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    with terminal(tmp_path, instance, "init", "-o", str(path)) as shown:
        shown.until("This machine: ")
        shown.until("or demo)")
        shown.type("no such model\n")
        shown.until("neither a hub id")
        shown.type("demo\n")
        while "Port" not in shown.text:  # on a machine with GPUs it asks for them
            shown._read(0.1)
            if "GPUs (all" in shown.text:
                shown.type("none\n")
                shown.until("Port")
        shown.type("99999\n")
        shown.until("is no port")
        shown.type("0\n")
        shown.until("API key (y, n)")
        shown.type("y\n")
        shown.until("Keep it")
        assert shown.wait() == 0
    assert "sk-default-" in shown.text
    assert "port: 0" in path.read_text() and "# Made for this machine: " in path.read_text()
    checked = cli(instance, "check", str(path))
    assert checked.returncode == 0, checked.stderr
    again = cli(instance, "init", "-o", str(path), "--yes")
    assert again.returncode == 2 and "--force" in again.stderr


# ---------------------------------------------------------------- when it all ends


@pytest.mark.lane("long")
def test_a_supervisor_that_dies_while_it_is_watched(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")]) as instance:
        instance.until_settled()
        with terminal(tmp_path, instance, "top", "--every", "0.2") as shown:
            shown.until("q quit")
            instance.process.kill()
            instance.process.wait()
            until(shown, "its end", lambda: "no servekit runs in" in frame(shown)[1])
            shown.type("q")
            assert shown.wait() == 0
        assert "Traceback" not in shown.text
        told = cli(instance, "events").stdout
        assert "ready" in told, "also when nobody lives there"
    (instance.run_dir / FILE).write_bytes(b"half a file, and the wrong half" * 99)
    for tail in ("-journal",):
        (instance.run_dir / f"{FILE}{tail}").unlink(missing_ok=True)
    with Instance.up(tmp_path, [echo("a")]) as instance:
        instance.until_settled()
        assert instance.model("a").replicas[0].state == "ready"
        seen = EventFilter(kinds=("ready",))
        instance.until("a new one is begun", lambda: newest_events(instance.run_dir, seen, 9))
        assert "journal_unwritable" in instance.log
        assert (instance.run_dir / f"{FILE}.broken").exists()
