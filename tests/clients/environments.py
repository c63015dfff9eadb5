"""An environment for one client: a virtual environment, or a folder of npm's.

It is made once, under a name that says what was asked for, and kept. Its programs get neither this
process's packages nor pip's constraints.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

#: Installing may fetch a gigabyte.
INSTALL_S = 1800.0
_DONE = "installed.json"
#: What would make one environment depend on another, or on where this is run.
_NOT_INHERITED = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "PIP_CONSTRAINT",
    "PIP_REQUIRE_VIRTUALENV",
)
#: One line of a script's output: what was tried, and "" or why it failed.
_RESULT = "RESULT "

Result = tuple[str, bool, str]


class NotInstalled(Exception):
    """The client cannot be installed here."""


class Environment:
    """A client's own packages under `cache`."""

    def __init__(
        self, cache: Path, name: str, requirements: Sequence[str], *, npm: bool = False
    ) -> None:
        asked = "\n".join([sys.version.split()[0], *requirements])
        self._folder = cache / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
        self._requirements = tuple(requirements)
        self._npm = npm

    def install(self, *, torch: bool = False) -> str:
        """Return the client's version, after it has been installed. Raises NotInstalled.

        A second run with the same cache waits for the first one's installation.
        """
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        with self._folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._install(torch=torch)

    def _install(self, *, torch: bool) -> str:
        if not (self._folder / _DONE).is_file():
            shutil.rmtree(self._folder, ignore_errors=True)  # of an installation that was cut off
            self._folder.mkdir()
            if self._npm:
                (self._folder / "package.json").write_text('{"private": true, "type": "module"}')
                self._check("npm", "install", "--no-fund", "--no-audit", *self._requirements)
            else:
                self._check(sys.executable, "-m", "venv", str(self._folder))
                pinned = [f"torch=={metadata.version('torch').partition('+')[0]}"] if torch else []
                pip = (self._python, "-m", "pip", "install", "--quiet", "--no-compile")
                self._check(*pip, *self._requirements, *pinned)
            (self._folder / _DONE).write_text(json.dumps({"version": self._version()}))
        return str(json.loads((self._folder / _DONE).read_text())["version"])

    def run(self, script: Path, told: Mapping[str, str], within_s: float) -> list[Result]:
        """Run a script; what it reports, or why it could report nothing."""
        if self._npm:  # node looks for packages beside the script
            script = Path(shutil.copy(script, self._folder))
        command = ("node" if self._npm else self._python, str(script))
        try:
            done = self._run(*command, within_s=within_s, env=told)
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace")
            return [*_results(said), ("the end", False, f"not within {within_s:g} s")]
        found = list(_results(done.stdout))
        if done.returncode or not found:
            why = _last_line(done.stderr) or f"exit code {done.returncode}"
            found.append(("the script", False, why))
        return found

    @property
    def _python(self) -> str:
        return str(self._folder / "bin" / "python")

    def _version(self) -> str:
        name = self._requirements[0].partition("[")[0]
        if self._npm:
            package = self._folder / "node_modules" / name / "package.json"
            return str(json.loads(package.read_text())["version"])
        code = f"from importlib.metadata import version; print(version({name!r}))"
        return self._check(self._python, "-c", code).strip()

    def _check(self, *command: str) -> str:
        try:
            done = self._run(*command, within_s=INSTALL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotInstalled(str(error)) from error
        if done.returncode:
            raise NotInstalled(_last_line(done.stderr) or f"{command[0]} failed")
        return done.stdout

    def _run(
        self, *command: str, within_s: float, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        return subprocess.run(
            command,
            cwd=self._folder,
            env=inherited | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"} | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )


def _results(output: str) -> Iterator[Result]:
    for line in output.splitlines():
        if line.startswith(_RESULT):
            what, why = json.loads(line.removeprefix(_RESULT))
            yield what, not why, why


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
