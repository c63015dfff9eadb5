"""`servekit up` and `bench` on a terminal: a real pseudo-terminal, a real Ctrl-C typed into it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.instance import Instance, echo, run, write_config

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOURS = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-7]|9[0-7]|38;[0-9;]+)(?:;[0-9]+)*m")


class Terminal:
    """A program on a terminal of its own, 30 by 110."""

    def __init__(self, args: list[str], env: Mapping[str, str]) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
        self._fd = ours
        self.raw = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.on_terminal", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # Rich would believe COLUMNS and LINES before the terminal itself.
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "30", **env},
        )
        os.close(theirs)

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self.raw)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode(errors="surrogateescape"))

    def until(self, words: str, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while words not in self.text:
            assert time.monotonic() < deadline, f"no {words!r} in:\n{self.text}"
            self._read(0.1)

    def until_line(self, words: str, within_s: float = 30.0) -> str:
        """The whole line with these words in it, once its end is there too."""
        deadline = time.monotonic() + within_s
        while True:
            for line in self.text.splitlines(keepends=True):
                if words in line and line.endswith("\n"):
                    return line.rstrip()
            assert time.monotonic() < deadline, f"no line {words!r} in:\n{self.text}"
            self._read(0.1)

    def wait(self, within_s: float = 60.0) -> int:
        deadline = time.monotonic() + within_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end:\n{self.text}"
            self._read(0.1)
        self._read(0.0)
        return self.process.returncode

    def _read(self, within_s: float) -> None:
        if select.select([self._fd], [], [], within_s)[0]:
            with contextlib.suppress(OSError):  # EIO: the other end is closed
                self.raw += os.read(self._fd, 2**16).decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@contextlib.contextmanager
def up(
    folder: Path,
    models: list[dict[str, Any]],
    *args: str,
    env: Mapping[str, str] | None = None,
    server: Mapping[str, Any] | None = None,
) -> Iterator[Terminal]:
    config = write_config(folder, models, server)
    terminal = Terminal(
        ["up", "-c", str(config), "--run-dir", str(folder / "run"), *args], env or {}
    )
    try:
        yield terminal
    finally:
        terminal.close()


def test_progress_then_one_banner_then_ctrl_c(tmp_path: Path) -> None:
    models = [echo("slow", load_s=1.5), echo("bad", load_error="no weights here")]
    with up(tmp_path, models) as terminal:
        terminal.until("of 20 steps")
        assert "━" in terminal.text, "a bar"
        terminal.until("slow/0     loading  ")  # the width is that of the longest state
        terminal.until("╰")
        banner = terminal.text[terminal.text.rindex("╭") :]
        assert "http://127.0.0.1:" in banner
        assert "failed: no weights here" in banner
        assert "servekit down" in banner
        assert COLOURS.search(terminal.raw)
        terminal.type("\x03")
        assert terminal.wait() == 0
        assert terminal.text.count("╭") == 1
        assert "Traceback" not in terminal.text
        assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l"), "cursor is back"


@pytest.mark.parametrize(
    ("server", "args", "prints"),
    [
        ({}, (), True),
        pytest.param({"browser_link": False}, (), False, marks=pytest.mark.lane("long")),
        pytest.param({"host": "0.0.0.0"}, ("--insecure",), False, marks=pytest.mark.lane("long")),
    ],
)
def test_a_link_for_the_browser_where_nobody_can_overhear_it(
    tmp_path: Path, server: dict[str, Any], args: tuple[str, ...], prints: bool
) -> None:
    with up(tmp_path, [echo("a")], *args, server={"ui": True, **server}) as terminal:
        terminal.until("╯")
        if prints:
            answer = httpx.get(terminal.until_line("/ui?token="))
            assert (answer.status_code, answer.headers["location"]) == (303, "/ui/")
            assert answer.headers["set-cookie"].startswith("servekit-session-")
        terminal.type("\x03")
        assert terminal.wait() == 0
        assert ("token=" in terminal.text) is prints


@pytest.mark.lane("long")
def test_a_link_to_an_instance_in_the_background_is_not_in_its_log(tmp_path: Path) -> None:
    with up(tmp_path, [echo("a")], "-d", server={"ui": True}) as terminal:
        try:
            assert terminal.wait() == 0
            assert httpx.get(terminal.until_line("/ui?token=")).status_code == 303
            assert "is up" in (tmp_path / "run.log").read_text()
            assert "token=" not in (tmp_path / "run.log").read_text()
        finally:
            run("down", "--run-dir", str(tmp_path / "run"))


@pytest.mark.lane("long")
def test_log_lines_scroll_above_the_picture(tmp_path: Path) -> None:
    with up(tmp_path, [echo("slow", load_s=600)]) as terminal:
        terminal.until("loading")
        line = terminal.until_line("The gateway serves")
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d gateway/0    The gateway serves after \d+(\.\d+)? s", line
        )
        terminal.type("\x03")
        assert terminal.wait() == 0


@pytest.mark.lane("long")
@pytest.mark.parametrize("args", [(), ("--quiet",)])
def test_no_color_is_honoured(tmp_path: Path, args: tuple[str, ...]) -> None:
    with up(tmp_path, [echo("a", load_s=0.3)], *args, env={"NO_COLOR": "1"}) as terminal:
        if args:
            while not (tmp_path / "run" / "control.sock").exists():
                terminal._read(0.05)
        else:
            terminal.until("╰")
        terminal.type("\x03")
        assert terminal.wait() == 0
        assert not COLOURS.search(terminal.raw)
        assert ("╭" in terminal.text) != bool(args)


@pytest.mark.lane("long")
def test_the_picture_of_a_load_and_its_table(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", step_s=0.01)]) as instance:
        url = instance.until_settled().url
        terminal = Terminal(["bench", url, "-c", "4", "-d", "60s", "--output-tokens", "20"], {})
        try:
            terminal.until("under way")
            terminal.until("between chunks")
            assert "━" in terminal.text, "a bar"
            assert "4 at once" in terminal.text
            terminal.type("\x03")
            assert terminal.wait() == 0
        finally:
            terminal.close()
    assert "Interrupted; measured until then" in terminal.text
    assert "time to first token" in terminal.text
    assert "Traceback" not in terminal.text
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l"), "cursor is back"
