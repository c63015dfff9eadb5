"""Experiments on processes in their parts: whom they choose, what they skip, what they see."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.chaos import process_experiments as experiments
from servekit.chaos.result import ExperimentContext
from servekit.chaos.target import Target
from servekit.protocol.messages import ReplicaStatus, Status, WorkerState
from servekit.system import procfs
from servekit.system.parent_death import CHAOS
from tests.polling import poll
from tests.unit.cli.instance import listening, make_model, make_replica, make_status


def context(folder: Path) -> ExperimentContext:
    path = folder / "servekit.yaml"
    path.write_text("models: [{name: m, engine: echo}]")
    status = replace(make_status(), config=str(path))
    return ExperimentContext(Target("http://127.0.0.1:1", folder, status, "m", "no-such-mark"), ())


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def worker(pid: int, state: WorkerState = "ready", name: str = "m/0") -> ReplicaStatus:
    return replace(make_replica(name, state), pid=pid)


def of(*replicas: ReplicaStatus) -> Status:
    return make_status(make_model("m", *replicas))


# ---------------------------------------------------------------- what is skipped


async def test_what_cannot_be_tried_is_skipped_with_the_reason(tmp_path: Path) -> None:
    finding = await experiments.engine_stalled(context(tmp_path))
    assert finding.verdict == "skipped" and "cannot be made to hang" in finding.detail
    gone = context(tmp_path)
    gone.target.config_path.unlink()
    finding = await experiments.worker_stopped(gone)
    assert finding.verdict == "skipped" and "has no stall_timeout_s" in finding.detail


async def test_steps_are_made_to_raise_only_where_a_worker_was_started_for_it(
    tmp_path: Path, victim: subprocess.Popen[bytes]
) -> None:
    scene = context(tmp_path)
    with listening(tmp_path, lambda message: None, of(worker(victim.pid))):
        finding = await experiments.step_raises(scene)
    assert finding.verdict == "skipped" and f"`{CHAOS}=1 servekit up" in finding.detail
    assert victim.poll() is None


async def test_an_engine_without_processes_of_its_own_loses_none(tmp_path: Path) -> None:
    scene = context(tmp_path)
    with listening(tmp_path, lambda message: None, of(worker(os.getpid()))):
        finding = await experiments.engine_process_killed(scene)
    assert finding.verdict == "skipped" and "no process but the worker's" in finding.detail


# ---------------------------------------------------------------- whom it hits, what it sees


async def test_the_busiest_ready_worker_is_the_victim(tmp_path: Path) -> None:
    replicas = (
        replace(worker(1, name="m/0"), running=1),
        replace(worker(2, name="m/1"), running=3),
        replace(worker(3, "loading", "m/2"), running=9),
        replace(worker(4, name="m/3"), reason="killed by SIGKILL"),
    )
    scene = context(tmp_path)
    with listening(tmp_path, lambda message: None, of(*replicas)):
        assert (await experiments._find_busiest(scene)).name == "m/1"
        assert await experiments._exit_reason(scene, "m/3") == "killed by SIGKILL"
        assert await experiments._exit_reason(scene, "m/9") == ""


async def test_a_worker_is_given_up_once_it_is_not_ready_any_more(tmp_path: Path) -> None:
    stopped = worker(7)
    assert not experiments._given_up(of(stopped, worker(8)), stopped)
    for status in (of(worker(7, "stalled")), of(worker(9)), make_status(make_model("m"))):
        assert experiments._given_up(status, stopped)
    news = [of(stopped), of(worker(7, "stalled"))]
    with listening(tmp_path, lambda message: None, lambda: news.pop(0) if news else of(stopped)):
        scene = context(tmp_path)
        notice_s = await scene.target.await_status(
            lambda status: experiments._given_up(status, stopped), 10.0
        )
    assert notice_s is not None


def test_a_loss_is_a_ready_process_that_is_ready_no_more() -> None:
    before = of(worker(7), worker(8, "loading", "m/1"))
    assert not experiments._lost_any(before, before)
    assert not experiments._lost_any(before, of(worker(7), worker(9, "ready", "m/1")))
    assert experiments._lost_any(before, of(worker(7, "stalled")))
    assert experiments._lost_any(before, of(worker(9)))


def test_a_stopped_process_goes_on(victim: subprocess.Popen[bytes]) -> None:
    def state() -> str:
        return Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0]

    os.kill(victim.pid, 19)
    poll("it is stopped", lambda: state() == "T")
    experiments._resume_process(victim.pid)
    poll("it goes on", lambda: state() == "S")
    victim.kill()
    victim.wait()
    experiments._resume_process(victim.pid)  # it is gone


def test_a_worker_for_experiments_is_known_by_its_environment() -> None:
    for value, takes in (("1", True), ("0", False), (None, False)):
        env = {} if value is None else {CHAOS: value}
        command = ["/bin/sh", "-c", "echo it runs; read x"]  # until its input ends
        with subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            assert experiments.takes_fail_step(process.pid) is takes
            process.stdin.close()


def test_processes_of_an_engine_are_those_below_its_worker_with_its_marks() -> None:
    mark = experiments._ENGINES[0]
    command = f"exec -a '{mark}' sleep 600 & echo $!; sleep 600 & wait"
    with subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            engine = int(process.stdout.readline())
            # until both run their own programs, they have the shell's command line
            poll("one is found", lambda: experiments.engine_processes(process.pid) == [engine])
        finally:
            for one in procfs.find_descendants(process.pid):
                os.kill(one.pid, 9)
            process.kill()


def test_a_dump_of_stacks_is_looked_for_in_what_is_new_in_the_logs(tmp_path: Path) -> None:
    scene = context(tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    log, dump = logs / "m~0.log", "Thread 1 (most recent call first):\n"
    log.write_text(f"ä\n{dump}")
    (logs / "gateway-0.log").write_text("")
    before = experiments._log_lengths(scene)
    assert before == {log: len(f"ä\n{dump}")}, "of workers alone, in characters"
    assert not experiments._has_dumped(scene, before), "that was before"
    with log.open("a") as file:
        file.write(dump)
    assert experiments._has_dumped(scene, before)
    assert not experiments._has_dumped(scene, experiments._log_lengths(scene))
    (logs / "m~1.log").write_text(dump)
    assert experiments._has_dumped(scene, {log: 2 * len(f"ä\n{dump}")}), "a new log"
