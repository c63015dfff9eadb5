"""The run directory of a living instance is removed; commands find the instance all the same.

Or the folder is removed in which it was started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from servekit.supervisor.process.run_dir import read_record
from tests.integration.instance import PROGRAM, Instance, echo

ASKED = {"model": "a", "messages": [{"role": "user", "content": "one two"}]}


def cli(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **(env or {})},
    )


def answer(url: str) -> str:
    told = httpx.post(f"{url}/v1/chat/completions", json=ASKED, timeout=30)
    return str(told.json()["choices"][0]["message"]["content"]) if told.is_success else told.text


@pytest.mark.lane("long")
def test_an_instance_goes_on_without_its_run_directory(tmp_path: Path) -> None:
    """As logind removes it: workers and gateways that die come back, and are reached."""
    with Instance.up(tmp_path, [echo("a")], server={"gateways": 2}) as instance:
        before = instance.until_settled()
        said = answer(before.url)
        shutil.rmtree(instance.run_dir)
        instance.until("it is asked again", instance.running, within_s=10)
        assert instance.status().url == before.url
        # a gateway that is new reaches the worker that is old
        for gateway in before.gateways:
            os.kill(gateway.pid, signal.SIGKILL)
        instance.until(
            "gateways are new",
            lambda: all(
                gateway.state == "ready" and gateway.pid not in {one.pid for one in before.gateways}
                for gateway in instance.status().gateways
            ),
        )
        instance.until("the new gateways reach the worker", lambda: answer(before.url) == said)
        assert instance.replica("a/0").pid == before.models[0].replicas[0].pid
        # a worker that is new finds a place for its socket
        shutil.rmtree(instance.run_dir)
        os.kill(before.models[0].replicas[0].pid, signal.SIGKILL)
        instance.until(
            "a worker is new",
            lambda: (
                instance.running()
                and instance.replica("a/0").state == "ready"
                and instance.replica("a/0").pid != before.models[0].replicas[0].pid
            ),
        )
        instance.until("the new worker answers", lambda: answer(before.url) == said)
        instance.until("events are kept again", (instance.run_dir / "events.db").is_file)
        assert instance.run_dir.stat().st_mode & 0o777 == 0o700
        done = cli("down", "--run-dir", str(instance.run_dir))
        assert done.returncode == 0, done.stderr
        assert instance.process.wait(timeout=10) == 0


@pytest.mark.lane("long")
def test_by_default_it_lives_in_the_state_directory_and_is_found_by_none_of_it(
    short: Path,
) -> None:
    state, elsewhere = short / "state", short / "elsewhere"
    (short / "runtime").mkdir()
    env = {"XDG_STATE_HOME": str(state), "XDG_RUNTIME_DIR": str(short / "runtime")}
    with Instance.begun(short, [echo("a")], env=env, run_dir=None) as instance:
        instance.run_dir = state / "servekit" / "default"
        instance.until("it runs", instance.running)
        instance.until_settled()
        assert not any((short / "runtime").iterdir())
        # others run on this machine, too: it is told, or is in their list
        for given in ({"XDG_STATE_HOME": str(elsewhere), "XDG_RUNTIME_DIR": ""}, {"HOME": "/"}):
            told = cli("ps", "--json", env={"XDG_STATE_HOME": "", **given})
            assert instance.url in told.stdout + told.stderr
        told = cli("ps", "--ready", env=env)
        assert told.returncode == 0, told.stderr
        record = read_record(instance.run_dir)
        done = cli("down", env=env)
        assert record is not None and f"(pid {record.pid}) has stopped" in done.stdout
        assert instance.process.wait(timeout=10) == 0
    # what it has written is there when it has ended
    assert (state / "servekit/default/events.db").is_file()
    assert "started" in cli("events", "--run-dir", str(instance.run_dir)).stdout


def test_why_tells_of_what_has_ended(tmp_path: Path) -> None:
    """`up` ends where no model can be served; what it died of is asked for after that."""
    doomed = echo("a", load_error="no such weights")
    with Instance.begun(tmp_path, [doomed]) as instance:
        assert instance.process.wait(timeout=60) == 1
        for name in ("a", "a/0"):
            told = cli("why", name, "--run-dir", str(instance.run_dir))
            assert told.returncode == 0, told.stderr
            assert "No servekit runs in" in told.stdout and "no such weights" in told.stdout
        told = cli("why", "a", "--json", "--run-dir", str(instance.run_dir))
        assert "no such weights" in json.loads(told.stdout.splitlines()[0])["what"]
        told = cli("why", "nobody", "--run-dir", str(instance.run_dir))
        assert told.returncode == 1 and "no servekit runs in" in told.stderr


def test_an_instance_starts_processes_where_its_working_directory_is_gone(tmp_path: Path) -> None:
    """As after a release, whose folder replaces the one before."""
    (tmp_path / "release").mkdir()
    with Instance.up(tmp_path, [echo("a")], cwd=tmp_path / "release") as instance:
        before = instance.until_settled()
        (tmp_path / "release").rmdir()
        os.kill(before.gateways[0].pid, signal.SIGKILL)
        os.kill(before.models[0].replicas[0].pid, signal.SIGKILL)

        def is_back() -> bool:
            now = (instance.gateway(), instance.replica("a/0"))
            return all(one.state == "ready" and one.restarts == 1 for one in now)

        instance.until("both are back", is_back)
        assert instance.reload() == "nothing to change"
