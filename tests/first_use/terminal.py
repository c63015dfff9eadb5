"""A shell in tmux: commands are typed, and the screen is read as a person would read it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.polling import poll

TMUX = shutil.which("tmux")
COLUMNS, LINES = 100, 40
#: The shell's prompt: the number of the command, and the exit status of the one before it.
PROMPT = re.compile(r"\[(\d+):(\d+)\]\$ *$")


@dataclass(slots=True)
class Terminal:
    """One shell in a tmux server of its own; `close` ends both and all that runs in them."""

    folder: Path
    env: Mapping[str, str]
    name: str
    _typed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        variables = [f"{name}={value}" for name, value in self.env.items()]
        shell = ["env", "-i", *variables, "PS1=[\\#:$?]$ ", "bash", "--norc", "--noprofile"]
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        self._run("-f", "/dev/null", "new-session", "-d", *size, "-c", str(self.folder), *shell)
        self._run("set-option", "-g", "history-limit", "5000")
        poll("the shell is there", self._find_prompt)

    def _run(self, *args: str) -> str:
        assert TMUX is not None, "tmux is not installed"
        command = [TMUX, "-L", self.name, *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def close(self) -> None:
        self._run("kill-server")

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names, such as C-c or Enter."""
        self._run("send-keys", *keys)

    def type(self, line: str) -> None:
        """Clear the screen and type a line with Enter."""
        found = self._find_prompt()
        if found is not None:
            self._typed = int(found[1])
        self.press("C-l")
        poll("the screen is clear", lambda: self._screen().count("\n") == 0)
        self._run("clear-history")
        self._run("send-keys", "-l", line)
        self.press("Enter")

    def _screen(self) -> str:
        return self._run("capture-pane", "-p").strip()

    def read(self) -> str:
        """Return all that stands on the screen and has scrolled off it since `type`."""
        return self._run("capture-pane", "-p", "-J", "-S", "-").rstrip()

    def read_coloured(self) -> str:
        """Return the screen with its escape sequences."""
        return self._run("capture-pane", "-p", "-e")

    def wait_for(self, words: str, within_s: float = 60.0) -> str:
        """Return the screen once it has `words` (a regular expression)."""
        pattern = re.compile(words)
        poll(f"{words!r} on the screen", lambda: pattern.search(self.read()), within_s)
        return self.read()

    def wait_until_done(self, within_s: float = 60.0) -> tuple[str, int]:
        """Return the screen without the prompt, and the exit status of the command."""
        found = poll("the command has ended", self._find_next_prompt, within_s)
        assert found is not None
        return self.read()[: -len(found[0])].rstrip(), int(found[2])

    def _find_prompt(self) -> re.Match[str] | None:
        return PROMPT.search(self.read())

    def _find_next_prompt(self) -> re.Match[str] | None:
        found = self._find_prompt()
        return found if found is not None and int(found[1]) > self._typed else None
