"""A new user's path, in commands and seconds: from `servekit init` to the first answer.

    python -m tests.bench.first_answer [--model PATH]

Each is a command that a user types; `up` runs on, and takes until it says that it is up. The model
is the demo's unless told otherwise: if it is not here yet, fetching and converting it is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SERVEKIT = (sys.executable, "-m", "servekit")
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
    with tempfile.TemporaryDirectory() as folder:
        steps = walk(Path(folder), parser.parse_args().model)
    for step in steps:
        print(f"{step.took_s:6.1f} s  {step.command}")
    print(f"{sum(step.took_s for step in steps):6.1f} s  {len(steps)} commands: {steps[-1].said}")


if __name__ == "__main__":
    main()
