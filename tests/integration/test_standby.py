"""Workers that are forked from a standby: as good as fresh ones, and gone as surely."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from servekit.protocol.messages import ReplicaStatus
from servekit.supervisor.workers.fork_server import FORK_S
from servekit.system import procfs
from servekit.system.parent_death import CHILD_MARK
from tests.integration.instance import Instance, echo
from tests.integration.test_faults_supervisor import cli, complete, rewrite, traffic
from tests.polling import poll


def forking(name: str = "a", **options: Any) -> dict[str, Any]:
    return {**echo(name, **options), "standby": True, "env": {"OF_THE_MODEL": "yes"}}


def standby(instance: Instance, model: str = "a") -> ReplicaStatus | None:
    return next((s for s in instance.model(model).standbys if s.state == "ready"), None)


def until_prepared(instance: Instance, model: str = "a") -> ReplicaStatus:
    instance.until_settled()
    found = instance.until("its standby is ready", lambda: standby(instance, model), 60)
    assert found is not None
    return found


def replaced(instance: Instance, pid: int, name: str = "a/0", within_s: float = 60) -> int:
    """The PID of the worker that serves in place of `pid`."""

    def other() -> int:
        now = instance.replica(name)
        return now.pid if now.state == "ready" and now.pid != pid else 0

    return instance.until("it is replaced", other, within_s)


def kill_and_replace(instance: Instance, name: str = "a/0") -> int:
    pid = instance.replica(name).pid
    os.kill(pid, signal.SIGKILL)
    return replaced(instance, pid, name)


def is_forked(pid: int) -> bool:
    # `ps` shows it as any worker, but for what a fresh interpreter is told on its command line.
    return "--control-fd" not in procfs.command_line(pid, 4096)


def workers_of(instance: Instance) -> list[int]:
    """The PIDs of the supervisor's children that `ps` shows as the worker a/0."""
    children = [one.pid for one in procfs.all_processes() if one.parent == instance.pid]
    return [pid for pid in children if " --name a/0" in procfs.command_line(pid, 4096)]


def environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    return dict(line.split("=", 1) for line in lines)


def test_what_replaces_a_dead_worker_is_forked_and_a_worker_of_its_own(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [forking()]) as instance:
        prepared = until_prepared(instance)
        first = instance.replica("a/0").pid
        before = environment(first)
        assert not is_forked(first)
        pid = kill_and_replace(instance)
        assert is_forked(pid)
        process = procfs.read_process(pid)
        assert process is not None
        assert process.parent == instance.pid
        assert process.group == pid == os.getsid(pid)
        after = environment(pid)
        assert after.pop(CHILD_MARK) not in (
            before.pop(CHILD_MARK),
            environment(prepared.pid)[CHILD_MARK],
        )
        assert {**after, "PYTORCH_NVML_BASED_CUDA_CHECK": ""} == {
            **before,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "",
        }
        assert complete(instance.url, "a", "hello", max_tokens=5).json()["choices"][0]["text"]
        assert "a/standby" in cli(instance, "ps").stdout
        again = kill_and_replace(instance)
        assert is_forked(again)
        instance.signal(signal.SIGTERM)
        assert instance.wait() == 0


@pytest.mark.lane("long")
def test_without_its_standby_a_worker_comes_back_and_so_does_the_standby(
    tmp_path: Path,
) -> None:
    with Instance.up(tmp_path, [forking()]) as instance:
        prepared = until_prepared(instance)
        worker = kill_and_replace(instance)
        os.kill(prepared.pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        replaced(instance, worker)  # afresh, if the next standby is not quicker
        again = until_prepared(instance)
        assert again.pid != prepared.pid
        assert is_forked(kill_and_replace(instance))


@pytest.mark.lane("long")
def test_the_end_of_a_standby_is_not_that_of_its_workers(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [forking()]) as instance:
        prepared = until_prepared(instance)
        worker = kill_and_replace(instance)
        os.kill(prepared.pid, signal.SIGKILL)
        instance.until("it is back", lambda: (s := standby(instance)) and s.pid != prepared.pid, 60)
        assert instance.replica("a/0").pid == worker
        assert complete(instance.url, "a").status_code == 200


@pytest.mark.lane("long")
def test_a_standby_that_does_not_answer_is_not_waited_for_long(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [forking()]) as instance:
        prepared = until_prepared(instance)
        os.kill(prepared.pid, signal.SIGSTOP)
        assert not is_forked(kill_and_replace(instance))
        assert "did not fork when it was asked to" in instance.log


@pytest.mark.lane("long")
def test_a_worker_that_is_forked_too_late_does_not_live_beside_a_fresh_one(tmp_path: Path) -> None:
    """The supervisor is suspended meanwhile: it finds the answer when its time is over, too."""
    with Instance.up(tmp_path, [forking()]) as instance:
        prepared = until_prepared(instance)
        os.kill(prepared.pid, signal.SIGSTOP)
        pid = instance.replica("a/0").pid
        os.kill(pid, signal.SIGKILL)
        instance.until("a fork is ordered", lambda: instance.replica("a/0").restarts == 1)
        ordered_at = time.monotonic()
        os.kill(instance.pid, signal.SIGSTOP)
        os.kill(prepared.pid, signal.SIGCONT)
        poll("it has forked", lambda: workers_of(instance))
        poll("its time is over", lambda: time.monotonic() > ordered_at + FORK_S + 1, FORK_S + 5)
        os.kill(instance.pid, signal.SIGCONT)
        fresh = replaced(instance, pid)
        assert not is_forked(fresh)
        instance.until("it is alone", lambda: workers_of(instance) == [fresh])
        assert complete(instance.url, "a").status_code == 200


@pytest.mark.lane("long")
@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_forked_outlives_the_supervisor(tmp_path: Path, stopped: bool) -> None:
    model = forking(grandchildren=2, escaped_grandchildren=2)
    with Instance.up(tmp_path, [model]) as instance:
        until_prepared(instance)
        started = procfs.find_descendants(instance.replica("a/0").pid)
        worker = kill_and_replace(instance)
        instance.until("the escaped were seen", lambda: _descendants(instance.pid) >= 8)
        started += procfs.find_descendants(worker)
        assert len(started) == 8
        if stopped:
            os.kill(worker, signal.SIGSTOP)
        # Leaving the block kills the supervisor, and asserts that nothing of it is left.
    assert not [one for one in started if procfs.is_alive(one.pid, one.started)]


@pytest.mark.lane("long")
def test_what_a_forked_worker_has_started_dies_with_it(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [forking(grandchildren=2)]) as instance:
        until_prepared(instance)
        worker = kill_and_replace(instance)
        started = {p.pid for p in procfs.find_descendants(worker)}
        assert len(started) == 2
        kill_and_replace(instance)
        instance.until("they are gone", lambda: not any(map(procfs.read_process, started)), 5)


@pytest.mark.lane("long")
def test_requests_are_answered_while_forked_workers_die(tmp_path: Path) -> None:
    model = {**forking(step_s=0.01), "replicas": 2}
    with Instance.up(tmp_path, [model]) as instance:
        until_prepared(instance)
        with traffic(instance.url, "a") as failed:
            for name in ("a/0", "a/1", "a/0", "a/1", "a/0", "a/1"):
                assert is_forked(kill_and_replace(instance, name))
        assert not failed


@pytest.mark.lane("long")
def test_where_a_library_initialises_cuda_on_import_workers_are_started_afresh(
    tmp_path: Path,
) -> None:
    # What torch says in a fork of a process that had initialised CUDA.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "sys.modules['torch'] = torch = types.ModuleType('torch')\n"
        "torch.cuda = types.SimpleNamespace(\n"
        "    is_initialized=lambda: False, _is_in_bad_fork=lambda: True)\n"
    )
    model = forking()
    model["env"]["PYTHONPATH"] = str(tmp_path)
    with Instance.up(tmp_path, [model]) as instance:
        until_prepared(instance)
        for _ in range(2):
            assert not is_forked(kill_and_replace(instance))
        assert "CUDA cannot be used after a fork" in instance.log
        instance.until("its standby has ended", lambda: not instance.model("a").standbys)


@pytest.mark.lane("long")
def test_a_reload_makes_and_ends_standbys(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [forking(), echo("b")]) as instance:
        first = until_prepared(instance)
        assert not instance.model("b").standbys
        rewrite(instance, [forking(max_context=4096), {**echo("b"), "standby": True}])
        assert cli(instance, "reload").returncode == 0
        instance.until("b has one", lambda: standby(instance, "b"), 60)
        instance.until("a has another", lambda: (s := standby(instance)) and s.pid != first.pid, 60)
        instance.until("the first is gone", lambda: procfs.read_process(first.pid) is None)
        instance.until("the old worker is gone", lambda: len(instance.model("a").replicas) == 1)
        assert is_forked(kill_and_replace(instance, instance.model("a").replicas[0].name))
        rewrite(instance, [{**forking(max_context=4096), "standby": False}])
        assert cli(instance, "reload").returncode == 0
        instance.until("there are none", lambda: not instance.model("a").standbys)


def _descendants(pid: int) -> int:
    return len(procfs.find_descendants(pid))
