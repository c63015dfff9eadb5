"""A running `servekit up` in a directory of its own, for tests that need a real one.

    with Instance.up(tmp_path, [echo("a", replicas=2)]) as instance:
        instance.until_settled()
        httpx.get(f"{instance.url}/readyz")

Leaving the block ends whatever still runs and asserts that nothing survived.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from servekit.cli.display.startup_display import is_start_over
from servekit.errors import ServekitError
from servekit.protocol.messages import (
    GatewayStatus,
    GetStatus,
    ModelStatus,
    ReplicaStatus,
    Status,
)
from servekit.supervisor.admin.control_socket import query_supervisor
from servekit.supervisor.process.run_dir import read_record
from servekit.system import procfs
from tests.polling import T, poll

PROGRAM = (sys.executable, "-m", "servekit")
#: A worker of pytest-xdist that is slow to end is killed, without its fixtures being torn down.
DIE_WITH_TESTS = ("setpriv", "--pdeathsig", "KILL")


def echo(name: str, *, replicas: int = 1, **options: object) -> dict[str, Any]:
    """A model of the echo engine; its options are `servekit.config.engines.options.EchoOptions`."""
    return {
        "name": name,
        "engine": "echo",
        "path": name,
        "replicas": replicas,
        "options": options,
    }


def write_config(
    folder: Path,
    models: Sequence[Mapping[str, Any]],
    server: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
) -> Path:
    """A configuration file on a free port. JSON is YAML."""
    path = folder / "servekit.yaml"
    settings = {"models": list(models), "server": {"port": 0, "ui": False, **(server or {})}}
    settings |= sections or {}
    path.write_text(json.dumps(settings, indent=2))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def stream_completion(
    url: str, headers: dict[str, str] | None = None, timeout: float = 60.0, **body: Any
) -> Iterator[str]:
    """Yield the texts of a streamed completion as they come."""
    asked = {"stream": True, **body}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=asked, headers=headers, timeout=timeout
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    command = [*PROGRAM, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class Instance:
    """One supervisor process and all that it starts."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        cwd: Path | None = None,
        run_dir: str | None = "run",
    ) -> None:
        self.run_dir = folder / (run_dir or "")
        self.log_path = folder / "up.log"
        self._unmarked: list[procfs.Process] = []  # all that it had started when it was ended
        self._mark = f"SERVEKIT_TEST={secrets.token_hex(8)}"
        name, value = self._mark.split("=")
        given = ("--run-dir", str(self.run_dir)) if run_dir else ()  # by default the default
        up = ("up", "--config", str(config), *given, *args)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*DIE_WITH_TESTS, *program, *up],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {}), name: value},
                cwd=cwd,
                start_new_session=True,
            )

    @classmethod
    @contextlib.contextmanager
    def up(
        cls,
        folder: Path,
        models: Sequence[Mapping[str, Any]],
        *args: str,
        server: Mapping[str, Any] | None = None,
        sections: Mapping[str, Any] | None = None,
        **start: Any,
    ) -> Iterator[Instance]:
        """An instance that has taken its run directory and its port; its models may load yet.

        `start` are the keywords of `Instance` itself.
        """
        with cls.begun(
            folder, models, *args, server=server, sections=sections, **start
        ) as instance:
            instance.until("it answers on its control socket", instance.running, within_s=60)
            yield instance

    @classmethod
    @contextlib.contextmanager
    def begun(
        cls,
        folder: Path,
        models: Sequence[Mapping[str, Any]],
        *args: str,
        server: Mapping[str, Any] | None = None,
        sections: Mapping[str, Any] | None = None,
        **start: Any,
    ) -> Iterator[Instance]:
        """An instance that has only just been started."""
        instance = cls(folder, write_config(folder, models, server, sections), *args, **start)
        try:
            yield instance
        finally:
            instance.end()

    # ---- what it says

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return self.status().url

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def running(self) -> bool:
        record = read_record(self.run_dir)
        if record is None or record.pid != self.pid:
            return False
        with contextlib.suppress(ServekitError):
            return bool(self.status())
        return False

    def status(self) -> Status:
        answer = asyncio.run(query_supervisor(self.run_dir / "control.sock", GetStatus()))
        assert isinstance(answer, Status)
        return answer

    def model(self, name: str) -> ModelStatus:
        return next(model for model in self.status().models if model.name == name)

    def replica(self, name: str) -> ReplicaStatus:
        replicas = (r for model in self.status().models for r in model.replicas)
        return next(replica for replica in replicas if replica.name == name)

    def gateway(self, index: int = 0) -> GatewayStatus:
        return self.status().gateways[index]

    # ---- waiting

    def until(self, what: str, probe: Callable[[], T], within_s: float = 60.0) -> T:
        def alive_and_true() -> T:
            found = probe()
            assert found or self.process.poll() is None, (
                f"it ended, waiting for: {what}\n{self.log}"
            )
            return found

        try:
            return poll(what, alive_and_true, within_s)
        except (AssertionError, ServekitError) as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def until_settled(self, within_s: float = 60.0) -> Status:
        """Gateways serve, and every replica is ready or has failed for good."""

        def probe() -> Status | None:
            status = self.status()
            return status if is_start_over(status) else None

        found = self.until("its start is over", probe, within_s)
        assert found is not None
        return found

    def until_ui(self, key: str = "", within_s: float = 180.0, **options: Any) -> None:
        """Wait until the pages are served, to the holder of `key` if keys are needed."""
        auth, url = ("me", key) if key else None, self.url

        def is_up() -> bool:
            return httpx.get(f"{url}/ui/", auth=auth, **options).status_code == 200

        self.until("the UI is up", is_up, within_s)

    def wait(self, within_s: float = 60.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {within_s:g} s\n{self.log}") from None

    # ---- commands

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return run(*args, "--run-dir", str(self.run_dir))

    def reload(self) -> str:
        done = self.run("reload")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    # ---- ending

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def survivors(self) -> list[procfs.Process]:
        """All that runs of it but itself, its guard and its grandchildren included.

        A process with an environment of its own does not carry the mark: `end` remembers it.
        """
        found = [process for process in procfs.find_marked(self._mark) if process.pid != self.pid]
        known = {process.pid for process in found}
        return found + [
            process
            for process in self._unmarked
            if process.pid not in known and procfs.is_alive(process.pid, process.started)
        ]

    def end(self) -> None:
        """Kill what runs; fail if anything outlives its supervisor by two seconds."""
        self._unmarked = procfs.find_descendants(self.pid)
        self.process.kill()
        self.process.wait()
        try:
            poll("nothing survives", lambda: not self.survivors(), within_s=2.0)
        except AssertionError:
            left = [(p.pid, procfs.command_line(p.pid)) for p in self.survivors()]
            for process in self.survivors():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            raise AssertionError(f"these outlived their supervisor: {left}\n{self.log}") from None
