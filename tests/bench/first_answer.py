"""A new user's path, in commands and seconds: from `servekit init` to the first answer.

    python -m tests.bench.first_answer [--model PATH] [--fresh | --install]

Each is a command that a user types; `up` runs on, and takes until it says that it is up. The model
is the demo's unless told otherwise: if it is not here yet, fetching and converting it is in it,
and with `--fresh`, which has an empty cache, it always is. Then comes the shortest way, `servekit
run`, up to the first character of the answer, again with an empty cache.

With `--install` only the shortest way is taken, as on a fresh machine: a virtual environment is
made, pip installs this folder into it, and its `servekit run` fetches the model and answers. pip's
time depends on where it gets its packages from; torch's wheel for CPUs alone has 190 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SERVEKIT = (sys.executable, "-m", "servekit")
ROOT = Path(__file__).parents[2]
CONSTRAINTS = "deploy/constraints.txt"
QUESTION = "What is the capital of France?"
WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Step:
    """One command: as it is typed, how long it took, and what it said."""

    command: str
    took_s: float
    said: str


def walk(folder: Path, model: str) -> list[Step]:
    """Do it, in an empty folder. Raises AssertionError where a command fails."""
    env = {**os.environ, "SERVEKIT_RUN_DIR": str(folder / "run"), "NO_COLOR": "1"}
    steps = [_done(folder, env, "init", "--yes", "--model", model, "--port", "0")]
    command = [*SERVEKIT, "up", "--config", "servekit.yaml", "--log-format", "json"]
    began_s = time.monotonic()
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as up:
        try:
            lines = _until_up(up)
            took_s = time.monotonic() - began_s
            steps.append(Step("servekit up --config servekit.yaml", took_s, "".join(lines)))
            [name] = json.loads(lines[-1])["models"]
            steps.append(_done(folder, env, "chat", name, "--temperature", "0", text=QUESTION))
        finally:
            up.send_signal(signal.SIGTERM)
            up.communicate(timeout=60)
    return steps


def install(folder: Path) -> list[Step]:
    """Install this folder into a new environment at `folder`. Raises AssertionError if it fails."""
    pip = (str(folder / "bin" / "python"), "-m", "pip")
    steps = []
    for command in (
        (sys.executable, "-m", "venv", str(folder)),
        (*pip, "install", "--quiet", "--no-compile", "-c", CONSTRAINTS, "."),
    ):
        began_s = time.monotonic()
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - began_s
        assert run.returncode == 0, run.stderr
        typed = " ".join(command).replace(f"{folder}/", ".venv/").replace(sys.executable, "python3")
        steps.append(Step(typed.replace(str(folder), ".venv"), took_s, ""))
    return steps


def walk_run(folder: Path, model: str, servekit: Sequence[str] = SERVEKIT) -> Step:
    """Time `servekit run` in an empty folder, to the first character of the answer."""
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "NO_COLOR": "1"}
    command = [*servekit, "run", model]
    began_s = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as run:  # fmt: skip
        assert run.stdin is not None and run.stdout is not None
        run.stdin.write(f"{QUESTION}\n")
        run.stdin.close()
        first = run.stdout.read(1)
        took_s = time.monotonic() - began_s
        said = first + run.stdout.read()
    assert run.returncode == 0 and first, said
    return Step(f'echo "{QUESTION}" | servekit run {model}', took_s, said)


def _until_up(up: subprocess.Popen[str]) -> list[str]:
    assert up.stderr is not None
    lines = []
    for line in up.stderr:
        lines.append(line)
        if json.loads(line)["event"] == "up":
            return lines
    raise AssertionError("".join(lines))


def _done(folder: Path, env: dict[str, str], *args: str, text: str = "") -> Step:
    began_s = time.monotonic()
    run = subprocess.run(
        [*SERVEKIT, *args], cwd=folder, env=env, input=text, capture_output=True, text=True,
        timeout=WITHIN_S, check=False,
    )  # fmt: skip
    took_s = time.monotonic() - began_s
    assert run.returncode == 0, run.stderr
    typed = " ".join(("servekit", *args))
    return Step(f'echo "{text}" | {typed}' if text else typed, took_s, run.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--fresh", action="store_true", help="with an empty cache of models")
    ways.add_argument("--install", action="store_true", help="in a new environment, all of it")
    options = parser.parse_args()
    if options.install:
        with _open_folder(fresh=True) as folder:
            steps = install(folder / "venv")
            steps.append(walk_run(folder, options.model, (str(folder / "venv/bin/servekit"),)))
        _print_steps(steps)
        return
    with _open_folder(fresh=options.fresh) as folder:
        steps = walk(folder, options.model)
    _print_steps(steps)
    with _open_folder(fresh=options.fresh) as folder:
        step = walk_run(folder, options.model)
    print(f"{step.took_s:6.1f} s  {step.command}, to the first character: {step.said}")


def _print_steps(steps: Sequence[Step]) -> None:
    for step in steps:
        print(f"{step.took_s:6.1f} s  {step.command}")
    print(f"{sum(step.took_s for step in steps):6.1f} s  {len(steps)} commands: {steps[-1].said}")


@contextlib.contextmanager
def _open_folder(*, fresh: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        if fresh:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        yield Path(folder)


if __name__ == "__main__":
    main()
