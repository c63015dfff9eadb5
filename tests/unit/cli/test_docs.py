"""`servekit docs`, as a program and on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from servekit.docs import pages


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "servekit", "docs", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def on_terminal(*args: str) -> str:
    """Return what a terminal shows, without its colours."""
    parent, child = pty.openpty()
    environment = {**os.environ, "PAGER": "cat", "TERM": "xterm", "COLUMNS": "90"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "servekit", "docs", *args]
    with subprocess.Popen(command, stdin=child, stdout=child, env=environment) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                part = os.read(parent, 2**16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        assert process.wait() == 0
    os.close(parent)
    assert b"\x1b[" in shown
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())


def test_without_a_page_it_lists_all() -> None:
    done = run()
    assert done.returncode == 0
    names = set(re.findall(r"^\| `([\w-]+)` \|", done.stdout, re.MULTILINE))
    assert names == set(pages.list_pages()) - {pages.INDEX}


def test_a_program_gets_markdown() -> None:
    assert run("gpus").stdout == pages.read_markdown(pages.find_page("gpus"))


def test_a_terminal_gets_it_formatted() -> None:
    shown = on_terminal("swapping")
    assert "Swapping models" in shown and "# Swapping" not in shown
    assert "Speed on GPUs (→ speed-on-gpus)" in " ".join(shown.split())
    assert "quickstart" in on_terminal()


@pytest.mark.lane("long")
def test_html_is_printed_and_written(tmp_path: Path) -> None:
    assert run("gpus", "--html").stdout.startswith("<!doctype html>")
    assert run("-o", str(tmp_path / "docs"), "--html").returncode == 0
    assert (tmp_path / "docs" / "gpus.html").is_file()


def test_a_page_there_is_not_is_told_in_a_sentence(tmp_path: Path) -> None:
    wrong = run("confguration")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "there is no page 'confguration'; did you mean 'configuration'?\n"
    (tmp_path / "file").write_text("")
    assert "cannot write" in run("-o", str(tmp_path / "file" / "x")).stderr
