"""The loop of `servekit top`: it polls an instance, draws it, and handles keys and signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from servekit.cli import instance_lookup
from servekit.cli.top.sampler import Sampler
from servekit.cli.top.view import draw_view
from servekit.errors import ServekitError, StartError
from servekit.event_store import Event, EventFilter, newest_events

#: Timeout of an answer; the picture then shows an error, and polling continues.
_ANSWER_S = 5.0
_EVENTS = 40
#: Time between the two samples of `print_once`: gateways report once a second.
_BETWEEN_S = 2.1
#: Width without a terminal.
_WIDE = 200
#: Minimum columns and rows of a window.
_LEAST = 20, 5


async def print_once(folder: Path, console: Console) -> None:
    """Print one picture, from two samples, since a rate needs an interval."""
    sampler = Sampler()
    sampler.add_status(await instance_lookup.status_soon(folder), time.monotonic())
    await asyncio.sleep(_BETWEEN_S)
    sampler.add_status(await instance_lookup.status_soon(folder), time.monotonic())
    view = sampler.view(await _read_events(folder))
    assert view is not None  # it has samples
    width = console.width if console.is_terminal else _WIDE
    for text in draw_view(view, width, None):
        console.print(text, soft_wrap=True)


async def watch_instance(folder: Path, console: Console, every_s: float) -> None:
    """Draw the picture until the user presses q. Raises StartError if no instance runs at first."""
    sampler = Sampler()
    sampler.add_status(
        await instance_lookup.status_soon(folder), time.monotonic()
    )  # raises if no instance runs
    with _listen_for_keys() as pressed, _open_screen(console) as screen:
        looking = asyncio.create_task(_update_screen(folder, sampler, screen, every_s))
        leaving = asyncio.create_task(pressed.wait())
        await asyncio.wait((looking, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not looking.cancel():
            looking.result()  # raises the loop's error


async def _update_screen(folder: Path, sampler: Sampler, screen: _Screen, every_s: float) -> None:
    while True:
        began, lost = time.monotonic(), ""
        try:
            sampler.add_status(
                await instance_lookup.status_soon(folder, _ANSWER_S), time.monotonic()
            )
        except StartError:
            lost = f"no servekit runs in {folder}"
        except (ServekitError, OSError) as error:
            lost = str(getattr(error, "message", error))
        screen.show(sampler, await _read_events(folder), lost)
        await asyncio.sleep(max(0.1, every_s - (time.monotonic() - began)))


async def _read_events(folder: Path) -> tuple[Event, ...]:
    return tuple(await asyncio.to_thread(newest_events, folder, EventFilter(), _EVENTS))


class _Screen:
    """The terminal window, redrawn when its size changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.live = Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._last: tuple[Sampler, tuple[Event, ...], str] | None = None

    def show(self, sampler: Sampler, events: tuple[Event, ...], lost: str) -> None:
        self._last = sampler, events, lost
        self.draw()

    def draw(self) -> None:
        if self._last is None:
            return
        sampler, events, lost = self._last
        width, height = self._console.size
        view = sampler.view(events, lost)
        if view is not None and width >= _LEAST[0] and height >= _LEAST[1]:
            # Without the last newline, which would scroll the first line away.
            picture = Text("\n").join(draw_view(view, width, height))
            picture.no_wrap = True
            self.live.update(picture, refresh=True)


@contextlib.contextmanager
def _open_screen(console: Console) -> Iterator[_Screen]:
    loop = asyncio.get_running_loop()
    screen = _Screen(console)
    loop.add_signal_handler(signal.SIGWINCH, screen.draw)
    loop.add_signal_handler(signal.SIGTSTP, _suspend, screen)
    try:
        with screen.live:
            yield screen
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)
        loop.remove_signal_handler(signal.SIGWINCH)


def _suspend(screen: _Screen) -> None:
    """Give the terminal back, and stop, as Ctrl-Z asks; go on where the shell says so."""
    loop, fd, ours = asyncio.get_running_loop(), sys.stdin.fileno(), None
    with contextlib.suppress(termios.error):
        ours = termios.tcgetattr(fd)
        shells = [*ours]
        shells[3] |= termios.ICANON | termios.ECHO
        termios.tcsetattr(fd, termios.TCSADRAIN, shells)
    screen.live.stop()
    loop.remove_signal_handler(signal.SIGTSTP)
    signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)  # stops right here
    loop.add_signal_handler(signal.SIGTSTP, _suspend, screen)
    if ours is not None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, ours)
    screen.live.start()
    screen.draw()


@contextlib.contextmanager
def _listen_for_keys() -> Iterator[asyncio.Event]:
    """Yield an event that is set to quit: q, Ctrl-C, Ctrl-D, SIGTERM, or a closed terminal."""
    loop, leave = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        loop.add_signal_handler(number, leave.set)
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        yield leave
        return
    before = termios.tcgetattr(fd)
    with contextlib.suppress(termios.error):
        tty.setcbreak(fd)
    loop.add_reader(fd, lambda: _on_key(fd, leave))
    try:
        yield leave
    finally:
        loop.remove_reader(fd)
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _on_key(fd: int, leave: asyncio.Event) -> None:
    try:
        keys = os.read(fd, 1024)
    except OSError:
        keys = b""
    if not keys or {b"q", b"Q", b"\x03", b"\x04"} & {keys[i : i + 1] for i in range(len(keys))}:
        leave.set()
