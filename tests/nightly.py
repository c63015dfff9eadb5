"""`python -m tests.nightly`: all that the ordinary run leaves out, one after the other.

    lanes          pytest -n 3 --lanes all
    lowest         python -m tests.lowest
    interpreters   python -m tests.interpreters, with each later Python that is on the PATH
    user           python -m tests.ordinary_user, if it is root who runs this
    audit          python -m tests.deploy.audit

--only NAMES     some of these, separated by commas
--pythons PATHS  interpreters that are not on the PATH

Prints how long each took; the exit code is 1 unless all passed. Measurements and what needs GPUs
are not among them: tests/bench, tests/soak, tests/gpu and `python -m tests.fuzz` with its whole
number of requests are run by hand.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.interpreters import ROOT

#: The versions that pyproject.toml names beside the oldest one, which the ordinary run has.
LATER = ("python3.12", "python3.13")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly")
    parser.add_argument("--only", default="", help="of lanes, lowest, interpreters, user, audit")
    parser.add_argument("--pythons", nargs="*", default=[name for name in LATER if _has(name)])
    args = parser.parse_args()
    commands = list_commands(args.pythons, is_root=os.geteuid() == 0)
    names = [name for name in args.only.split(",") if name] or list(commands)
    if unknown := set(names) - commands.keys():
        parser.error(f"no such parts: {', '.join(unknown)}; there are {', '.join(commands)}")
    rows = [(name, *run(commands[name])) for name in names]
    for name, passed, took_s in rows:
        print(f"{name:<14}{'passed' if passed else 'FAILED'}  {took_s / 60:5.1f} min")
    return int(not all(passed for _, passed, _ in rows))


def list_commands(pythons: Sequence[str], *, is_root: bool) -> dict[str, tuple[str, ...]]:
    """Return the parts of a night: without those that find no interpreter, or take root."""
    parts: dict[str, tuple[str, ...]] = {
        "lanes": ("pytest", "-n", "3", "--lanes", "all"),
        "lowest": ("tests.lowest",),
        "interpreters": ("tests.interpreters", *pythons),
        "user": ("tests.ordinary_user",),
        "audit": ("tests.deploy.audit",),
    }
    if not pythons:
        del parts["interpreters"]
    if not is_root:
        del parts["user"]
    return parts


def run(command: Sequence[str]) -> tuple[bool, float]:
    """Run a module; return whether it passed, and the seconds it took."""
    print(f"== {' '.join(command)}", flush=True)
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False)
    return done.returncode == 0, time.monotonic() - began_s


def _has(name: str) -> bool:
    return shutil.which(name) is not None


if __name__ == "__main__":
    sys.exit(main())
