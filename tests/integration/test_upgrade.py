"""An upgrade of the installed files: under a running instance, and between two."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import servekit
from servekit.protocol.messages import PROTOCOL
from tests.integration.instance import Instance, echo
from tests.polling import poll

pytestmark = [pytest.mark.lane("surroundings"), pytest.mark.slow]
SOURCE = Path(servekit.__file__).parent
MESSAGES = "protocol/messages.py"
UPGRADED = "servekit was upgraded while this instance ran: restart the instance"


class Installation:
    """A copy of the package, which a test may change."""

    def __init__(self, folder: Path) -> None:
        self._package = folder / "site" / "servekit"
        self.program = (sys.executable, "-P", "-m", "servekit")
        self.env = {"PYTHONPATH": str(self._package.parent)}
        self.copy()

    def copy(self, **changes: str) -> None:
        """Replace all files, as pip does; `changes` are appended to files of the package."""
        fresh = self._package.with_suffix(".new")
        shutil.copytree(SOURCE, fresh, ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in changes.items():
            path = fresh / name
            path.write_text(path.read_text() + text)
        shutil.rmtree(self._package, ignore_errors=True)
        fresh.rename(self._package)

    def run(self, instance: Instance, *words: str) -> str:
        command = [*self.program, *words, "--run-dir", str(instance.run_dir)]
        env = {**os.environ, **self.env}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=env, check=True
        )
        return " ".join(done.stdout.split())


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installation]:
    yield Installation(tmp_path)


def complete(url: str) -> int:
    body = {"model": "a", "prompt": "hello", "max_tokens": 5}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code


def times_told(instance: Instance, at_least: int) -> bool:
    return instance.log.count(UPGRADED) >= at_least


def test_an_upgrade_under_an_instance_is_told_and_a_restart_keeps_its_state(
    tmp_path: Path, installed: Installation
) -> None:
    models = [echo("a", replicas=2)]
    start: dict[str, Any] = {"program": installed.program, "env": installed.env}
    with Instance.up(tmp_path, models, **start) as instance:
        instance.until_settled()
        url = instance.url
        # a worker of a version that talks as the old one does serves; the log says what to do
        installed.copy()
        os.kill(instance.replica("a/0").pid, signal.SIGKILL)
        instance.until("it is told", lambda: "servekit_upgraded" in instance.log)
        instance.until("it is back", lambda: instance.replica("a/0").state == "ready")
        # one of another protocol, and one that cannot even start, are refused with a sentence
        for changes in (
            {MESSAGES: f"\nPROTOCOL = {PROTOCOL + 1}\n"},
            {"worker/worker.py": "\nimport servekit.gone\n"},
        ):
            installed.copy(**changes)
            told = partial(times_told, instance, 1 + instance.log.count(UPGRADED))
            os.kill(instance.replica("a/0").pid, signal.SIGKILL)
            poll(f"it is told of {changes}", told)
            assert complete(url) == 200
            installed.copy()
            instance.until("it is back", lambda: instance.replica("a/0").state == "ready")
        assert UPGRADED in installed.run(instance, "why", "a/0")
        installed.run(instance, "down")
        assert instance.wait() == 0
    with Instance.up(tmp_path, models, **start) as instance:
        instance.until_settled()
        assert complete(instance.url) == 200
        assert len(re.findall(r"up servekit \S+ at", installed.run(instance, "events"))) == 2
