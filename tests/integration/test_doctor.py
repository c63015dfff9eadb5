"""`servekit doctor` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servekit.diagnostics import service
from tests.integration.instance import PROGRAM, Instance, echo, write_config


def doctor(*args: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [*PROGRAM, "doctor", "--json", *args], capture_output=True, text=True, timeout=120
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.lane("long")
def test_a_machine_and_a_busy_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = write_config(tmp_path, [echo("a")], {"port": port})
        code, findings = doctor("--config", str(config), "--run-dir", str(tmp_path / "run"))
    errors = [finding["said"] for finding in findings if finding["level"] == "error"]
    assert code == 1
    assert any(f"127.0.0.1:{port} is already in use by pid {os.getpid()}" in e for e in errors)
    areas = {finding["area"] for finding in findings}
    assert areas >= {"versions", "torch", "gpu", "memory", "cpu", "shared memory", "limits", "disk"}
    assert not (tmp_path / "run").exists(), "it only looks"


@pytest.mark.lane("long")
def test_it_finds_the_file_that_up_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, [echo("a")])
    monkeypatch.chdir(tmp_path)
    _, findings = doctor("--run-dir", str(tmp_path / "run"))
    [found] = [finding for finding in findings if finding["area"] == "configuration"]
    assert found["said"].startswith("servekit.yaml: 1 workers")


@pytest.mark.lane("long")
def test_a_port_that_its_own_instance_holds_is_fine(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a")]) as instance:
        _, findings = doctor("--run-dir", str(tmp_path / "run"))
        [port] = [finding for finding in findings if finding["area"] == "port"]
        assert port["level"] == "ok" and f"pid {instance.pid}" in port["said"]


def test_an_instance_that_hangs_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_ANSWER_S", 1.0)
    with Instance.up(tmp_path, [echo("a")]) as instance:
        os.kill(instance.pid, signal.SIGSTOP)
        try:
            [hung] = service.check_ports(None, tmp_path / "run")
        finally:
            os.kill(instance.pid, signal.SIGCONT)
        monkeypatch.undo()
        [well] = service.check_ports(None, tmp_path / "run")
    assert hung.level == "error"
    assert f"did not answer within 1 s; it is stopped: kill -CONT {instance.pid}" in hung.said
    assert well.level == "ok", well.said


def test_its_own_process_stays_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom servekit.diagnostics.runner import run_checks\nrun_checks(None, None)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
