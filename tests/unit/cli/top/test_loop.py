"""The loop of `servekit top`: one picture, keys that quit, and what is shown of a lost instance."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from servekit.cli.top import loop
from servekit.cli.top.sampler import Sampler
from servekit.errors import StartError
from servekit.protocol.control.admin_messages import ModelTraffic
from tests.polling import poll_async
from tests.unit.cli.instance import invoke, listening, make_status


class Screen(io.StringIO):
    """What a terminal of 100 columns and 30 rows has been sent."""

    def isatty(self) -> bool:
        return True


def make_console(width: int = 100, height: int = 30) -> tuple[Console, Screen]:
    file = Screen()
    console = Console(file=file, width=width, height=height, force_terminal=True, markup=False)
    return console, file


async def test_one_picture_has_rates_of_two_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_BETWEEN_S", 0.01)
    status = make_status()
    news = [replace(status, traffic=(ModelTraffic("m", 0, tokens),)) for tokens in (0, 10**6)]
    file = io.StringIO()
    with listening(tmp_path, lambda message: None, lambda: news.pop(0)):
        await loop.print_once(tmp_path, Console(file=file))
    assert news == []
    lines = file.getvalue().splitlines()
    assert any("m/0" in line for line in lines)
    assert max(map(len, lines)) > 80, "a file has a wide table"


def test_without_an_instance_it_is_said(tmp_path: Path) -> None:
    done = invoke("top", "--once", run_dir=tmp_path)
    assert done.exit_code == 1 and f"no servekit runs in {tmp_path}" in done.stderr


@pytest.mark.parametrize(
    ("typed", "leaves"),
    [(b"q", True), (b"Q", True), (b"\x03", True), (b"\x04", True), (b"xyq", True), (b"x", False)],
)
def test_keys_that_quit(typed: bytes, leaves: bool) -> None:
    reading, writing = os.pipe()
    leave = asyncio.Event()
    os.write(writing, typed)
    loop._on_key(reading, leave)
    assert leave.is_set() is leaves
    os.close(writing)
    os.close(reading)


def test_a_terminal_that_is_gone_quits() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    leave = asyncio.Event()
    loop._on_key(reading, leave)
    assert leave.is_set(), "the end of the input"
    os.close(reading)
    leave = asyncio.Event()
    loop._on_key(reading, leave)
    assert leave.is_set(), "an error"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of the terminal that is stdin."""
    other, ours = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield other
    os.close(other)


@contextlib.asynccontextmanager
async def watching(folder: Path, console: Console) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(loop.watch_instance(folder, console, 0.2))
    try:
        yield task
        async with asyncio.timeout(20):
            await task
    finally:
        task.cancel()


async def test_it_draws_until_q_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, terminal: int
) -> None:
    before = termios.tcgetattr(terminal)
    console, file = make_console()
    with listening(tmp_path, lambda message: None):
        async with watching(tmp_path, console):
            await poll_async("it is drawn", lambda: "m/0" in file.getvalue())
            assert termios.tcgetattr(terminal) != before, "each key is read at once"
            os.write(terminal, b"q")
    assert termios.tcgetattr(terminal) == before
    assert file.getvalue().count("\x1b[?1049l") == 1, "the screen of before comes back"


async def test_an_instance_that_ends_is_shown_with_its_last_picture(
    tmp_path: Path, terminal: int
) -> None:
    console, file = make_console()
    with listening(tmp_path, lambda message: None):
        task = asyncio.create_task(loop.watch_instance(tmp_path, console, 0.2))
        await poll_async("it is drawn", lambda: "m/0" in file.getvalue())
    await poll_async("it is lost", lambda: "no servekit runs in" in file.getvalue())
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(20):
        await task


async def test_no_instance_at_first_is_an_error(tmp_path: Path, terminal: int) -> None:
    console, file = make_console()
    with pytest.raises(StartError):
        await loop.watch_instance(tmp_path, console, 0.2)
    assert file.getvalue() == ""


def test_a_window_that_is_too_small_is_left_as_it_is() -> None:
    sampler = Sampler()
    sampler.add_status(make_status(), 1.0)
    for width, height, drawn in ((20, 5, True), (19, 5, False), (20, 4, False)):
        console, file = make_console(width, height)
        screen = loop._Screen(console)
        screen.draw()  # nothing to show yet
        with screen.live:
            begin = len(file.getvalue())
            screen.show(sampler, (), "")
            assert (len(file.getvalue()) > begin) is drawn
