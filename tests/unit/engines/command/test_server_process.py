"""A server as a child: its name, its end and the reason, told once."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from servekit.engines.command.server_process import ServerProcess
from servekit.errors import LoadError
from servekit.system import procfs


def start(*words: str, **more: str) -> tuple[ServerProcess, threading.Event]:
    told = threading.Event()
    return ServerProcess(words, told.set, more), told


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("/bin/sh", "-c", "exit 0"), "sh"),
        ((sys.executable, "-m", "this"), "this"),
        ((sys.executable, "-m"), Path(sys.executable).name),
        ((sys.executable, "-c", "pass"), Path(sys.executable).name),
    ],
)
def test_a_server_is_called_as_its_program_or_module(words: tuple[str, ...], name: str) -> None:
    server, told = start(*words)
    assert told.wait(30)
    assert server.name == name


def test_its_end_is_told_with_the_reason() -> None:
    server, told = start("sh", "-c", "exit 3")
    assert told.wait(30) and server.exited.is_set()
    assert server.cause == "the server sh exited with code 3"
    server, told = start("sh", "-c", "exit 0")
    assert told.wait(30)
    assert server.cause == "the server sh exited with code 0"
    server, told = start("sh", "-c", "kill -9 $$")
    assert told.wait(30)
    assert server.cause == "the server sh was killed by SIGKILL"


def test_it_gets_our_environment_and_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    path = tmp_path / "out"
    _, told = start("sh", "-c", f'echo "$OURS $MORE $(cat)" > {path}', MORE="2")
    assert told.wait(30)
    assert path.read_text() == "1 2 \n", "and its input is empty"


def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(LoadError, match=r"^no-such-server cannot be started: No such file or dir"):
        start("no-such-server")


def test_stop_asks_first_and_insists_later() -> None:
    server, told = start("sleep", "600")
    began = time.monotonic()
    server.stop(30.0)
    assert told.wait(30) and time.monotonic() - began < 30
    assert server.cause == "the server sleep was killed by SIGTERM"
    assert procfs.read_process(server.pid) is None
    stubborn, told = start("sh", "-c", "trap '' TERM; echo; exec sleep 600")
    stubborn.stop(0.05)
    assert stubborn.exited.is_set()
    assert told.wait(30)
