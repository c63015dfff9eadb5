"""Worker processes with real echo workers: every way from one state to the next."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from servekit.config.schema import ModelConfig
from servekit.protocol.adapters import AdapterSpec
from servekit.protocol.messages import (
    PROTOCOL,
    Generate,
    Hello,
    Pong,
    Quarantined,
    SamplingParams,
    Stop,
    WorkerToGateway,
)
from servekit.protocol.transport.connection import Connection, dial_address
from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.adapters.state import Refusal
from servekit.supervisor.deployments.deployment import Deployment, list_adapters
from servekit.supervisor.lifecycle.restart_policy import (
    BreakerLimits,
    CircuitBreaker,
    Limits,
    RestartPolicy,
)
from servekit.supervisor.process.child_process import Exit
from servekit.supervisor.process.run_dir import RunDir
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system import procfs
from servekit.system.gpu.gpus import Gpu
from tests.polling import poll_async

GPU = Gpu(0, "GPU-aa", "H200", 10, 10)


class Host:
    """What a supervisor is to a life; it wakes who waits for a change."""

    launcher = None

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir.claim(path)
        self.mark = "of-a-unit-test"
        self.environ: Mapping[str, str] = {"PATH": os.environ["PATH"]}
        self.states: list[str] = []
        self.replica: WorkerProcess | None = None
        self._changes = asyncio.Event()

    def publish_change(self) -> None:
        assert self.replica is not None
        if self.states[-1:] != [self.replica.state]:
            self.states.append(self.replica.state)
        self._changes.set()

    def keys_of(self, model: ModelConfig) -> Mapping[str, str]:
        return {}

    def publish_later(self) -> None:
        self.publish_change()

    def children_changed(self) -> None:
        pass

    def on_line(self, name: str, text: str) -> None:
        pass

    def quarantine(self, request: Quarantined) -> None:
        pass

    drain_timeout_s, is_away = 1.0, False  # as a fleet has it

    def workers(self, adapters: Adapters) -> Sequence[WorkerProcess]:
        assert self.replica is not None
        return [self.replica]

    def is_unused(self, adapter: str) -> bool:
        return True

    async def until(self, true: Callable[[], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not true():
                self._changes.clear()
                await self._changes.wait()


class Stage:
    """One replica, its host, and the task that runs it."""

    def __init__(self, host: Host, replica: WorkerProcess) -> None:
        self.host = host
        self.replica = host.replica = replica
        replica.policy = RestartPolicy(lambda: 0.5, Limits(first_s=0.01, longest_s=0.02))
        self.task = asyncio.get_running_loop().create_task(replica.supervise())

    async def until(self, state: str) -> None:
        await self.host.until(lambda: self.replica.state == state)


def worker(host: Host, gpus: tuple[Gpu, ...] = (), **settings: object) -> WorkerProcess:
    model = ModelConfig.model_validate({"name": "m", "path": "p", "engine": "echo", **settings})
    circuit = CircuitBreaker("m", BreakerLimits(lives=3, first_s=600))
    adapters = Adapters("m", list_adapters(model), cast(Deployment, host))
    host.replica = WorkerProcess(model, Assignment("m", 0, (), 1), gpus, host, circuit, adapters)
    return host.replica


Play = Callable[..., Stage]


@pytest.fixture
async def play(tmp_path: Path) -> AsyncIterator[Play]:
    host = Host(tmp_path / "run")
    stages: list[Stage] = []

    def start(
        gpus: tuple[Gpu, ...] = (), settings: dict[str, object] | None = None, **options: object
    ) -> Stage:
        stages.append(Stage(host, worker(host, gpus, options=options, **(settings or {}))))
        return stages[-1]

    yield start
    for stage in stages:
        child = stage.replica.child
        stage.replica.end_child(Stop(), 0.2)
        await asyncio.wait_for(stage.task, 10)
        assert child is None or procfs.read_process(child.pid) is None
    host.run_dir.unlock()


async def test_it_comes_up_and_ends(play: Play) -> None:
    stage = play(load_s=0.2)
    await stage.until("ready")
    assert stage.replica.info is not None
    assert stage.replica.info.architecture == "echo"
    stage.replica.end_child(Stop(), 5.0)
    await asyncio.wait_for(stage.task, 60)
    assert stage.host.states == ["starting", "loading", "ready", "draining", "stopped"]
    assert stage.replica.replica_status().pid == 0


async def test_a_death_is_followed_by_a_new_life(play: Play) -> None:
    stage = play()
    await stage.until("ready")
    first = stage.replica.replica_status()
    os.kill(first.pid, signal.SIGKILL)
    await stage.host.until(lambda: stage.replica.restarts == 1)
    await stage.until("ready")
    second = stage.replica.replica_status()
    assert second.pid != first.pid
    assert second.socket != first.socket
    assert second.reason == "killed by SIGKILL"
    assert not os.access(first.socket, os.F_OK)


async def test_an_engines_death_is_told_in_its_own_words(play: Play) -> None:
    stage = play(raise_on="(raise)")
    await stage.until("ready")
    first = stage.replica.replica_status()
    asked: Connection[WorkerToGateway] = await dial_address(
        first.socket, lambda: Connection(WorkerToGateway, lambda message: None, lambda error: None)
    )
    asked.send(Hello(PROTOCOL, "gateway", "g"))
    asked.send(Generate(1, SamplingParams(max_tokens=9), prompt="(raise)"))
    await stage.host.until(lambda: stage.replica.restarts == 1)
    await stage.until("ready")
    assert "stalled" in stage.host.states, "from the word on it is sent nothing more"
    (death,) = stage.replica.make_history().exits
    assert death.what == "RuntimeError: the prompt contains '(raise)'"
    assert (death.code, death.signal, death.phase) == (os.EX_SOFTWARE, None, "ready")


def test_the_kernels_hand_is_seen_in_an_engines_death_only_where_it_killed() -> None:
    counted = Exit(os.EX_SOFTWARE, None, (), out_of_memory=True)
    killed = counted.of_engine("vLLM's engine core was killed by SIGKILL.")
    assert killed.explain() == (
        "vLLM's engine core was killed by SIGKILL, probably by the kernel: out of memory"
    )
    assert killed.out_of_memory
    other = counted.of_engine("IndexError: list index out of range")
    assert (other.explain(), other.out_of_memory) == ("IndexError: list index out of range", False)
    stopped = Exit(None, signal.SIGKILL, (), cause="stalled: no progress")
    assert stopped.of_engine("IndexError").explain() == "stalled: no progress"


async def test_a_permanent_boot_failure_is_not_tried_again(play: Play) -> None:
    stage = play(load_error="no such file")
    await stage.until("failed")
    status = stage.replica.replica_status()
    assert (status.reason, status.restarts, status.pid) == ("no such file", 0, 0)
    stage.replica.end_child(Stop(), 5.0)
    await asyncio.wait_for(stage.task, 60)


async def test_boot_failures_in_a_row_are_given_up(play: Play) -> None:
    stage = play(exit_on_load=9)
    await stage.until("failed")
    assert stage.replica.restarts == 2
    assert stage.replica.reason.startswith("crash loop: 3 processes in a row died before")
    assert "(the last: exit code 9 before it was ready)" in stage.replica.reason
    story = stage.replica.make_history()
    assert [record.code for record in story.exits] == [9, 9, 9]
    assert story.next_attempt_s is not None
    assert 290 < story.next_attempt_s <= 300, "the longest cool-down"
    stage.replica.retry()
    assert stage.replica.circuit is not None
    stage.replica.circuit.reset()
    await stage.host.until(lambda: stage.replica.restarts == 3)


@pytest.mark.parametrize("step", ["command", "send_greeting", "_describe_child"])
async def test_a_fault_of_its_supervision_costs_one_life(
    play: Play, step: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pids: list[int] = []

    def fail(replica: WorkerProcess) -> None:
        pids.append(replica.pid)
        monkeypatch.undo()
        raise ValueError("of a test")

    monkeypatch.setattr(WorkerProcess, step, fail)
    stage = play()
    if step == "_describe_child":
        await stage.until("ready")
        os.kill(stage.replica.pid, signal.SIGKILL)
    await stage.host.until(lambda: stage.replica.restarts == 1)
    await stage.until("ready")
    assert stage.replica.reason == "servekit's supervision of it failed: ValueError: of a test"
    assert stage.replica.pid not in pids
    assert not pids[0] or procfs.read_process(pids[0]) is None
    out, err = capfd.readouterr()
    assert "supervision_failed" in out + err


async def test_the_end_may_come_while_it_starts(play: Play) -> None:
    stage = play(load_s=600)
    await stage.until("starting")
    stage.replica.end_child(Stop(), 5.0)
    await asyncio.wait_for(stage.task, 60)
    assert stage.replica.state == "stopped"


async def test_now_means_now(play: Play) -> None:
    stage = play(ignore_sigterm=True)
    await stage.until("ready")
    stage.replica.end_child(Stop(), 600.0)
    await stage.until("draining")
    began = time.monotonic()
    stage.replica.end_now()
    await asyncio.wait_for(stage.task, 60)
    assert time.monotonic() - began < 3.0


async def test_a_pong_brings_the_load(play: Play) -> None:
    stage = play()
    await stage.until("ready")
    await poll_async("a pong", lambda: stage.replica.liveness.last.seq == 1)
    stage.replica.measure()
    assert stage.replica.replica_status().rss_bytes > 2**20


async def test_it_counts_requests_and_is_of_use_by_tokens_too(play: Play) -> None:
    stage = play()
    stage.replica.liveness.answered(Pong(1, 0.0, 2, 0, 0.0, served=193, finished=24))
    assert (stage.replica.load(), stage.replica.use()) == ((24, 2), 193)


async def test_memory_on_a_gpu_that_is_not_its_own_is_final(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML's answer is made up, since only a GPU gives one; the worker and its end are real."""
    pids: list[int] = []

    def holdings() -> dict[int, dict[str, int]]:
        pids.append(stage.replica.pid)
        return {stage.replica.pid: {"GPU-aa": 520 * 2**20}}

    monkeypatch.setattr("servekit.supervisor.workers.gpu_memory.gpu_memory_by_pid", holdings)
    stage = play(gpus=(GPU,))
    await stage.until("failed")
    expected = "worker m/0 holds 520 MiB on GPU 0 (H200), which is not its own"
    assert stage.replica.reason == expected
    assert stage.replica.restarts == 0
    assert procfs.read_process(pids[0]) is None
    assert "ready" not in stage.host.states


@pytest.mark.parametrize("said", ["alert", "fail"])
async def test_memory_that_strays_later_is_told_once_and_by_option_ends_it(
    play: Play, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stage = play(settings={"stray_memory": said})
    replica = stage.replica
    replica.gpu.gpus = (GPU,)  # as on a machine that has one; its NVML is made up
    await stage.until("ready")
    pid = replica.pid
    replica.measure_gpus({pid: {"GPU-aa": 520 * 2**20}})
    words = "holds 520 MiB on GPU 0 (H200), which is not its own"
    assert replica.replica_status().stray == words
    replica.measure_gpus({pid: {"GPU-aa": 520 * 2**20}})
    out, err = capfd.readouterr()
    assert (out + err).count("gpu_memory_stray") == 1
    if said == "fail":
        await stage.host.until(lambda: replica.restarts == 1)
        assert words in replica.history.exits()[-1].what
        return
    replica.measure_gpus({pid: {}})
    assert (replica.replica_status().stray, replica.pid) == ("", pid)


# ---------------------------------------------------------------- adapters


def adapter(folder: Path, name: str = "x") -> AdapterSpec:
    (folder / name).mkdir()
    (folder / name / "adapter_config.json").write_text("{}")
    return AdapterSpec(name, str(folder / name))


async def test_it_loads_and_unloads_and_says_what_it_holds(play: Play, tmp_path: Path) -> None:
    stage = play()
    await stage.until("ready")
    replica = stage.replica
    assert replica.serves
    assert await replica.ask_to_load(adapter(tmp_path)) == replica.held_adapters["x"]
    refused = await replica.ask_to_load(AdapterSpec("y", str(tmp_path / "nowhere")))
    assert isinstance(refused, Refusal)
    assert refused.invalid
    assert not refused.died
    assert await replica.ask_to_unload("x")
    assert not replica.held_adapters


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"crash_on_adapter": "x"}, "killed by SIGKILL"),
        ({"hang_on_adapter": "x"}, "stalled: it had not loaded the adapter 'x' after 0.3 s"),
    ],
)
async def test_a_death_is_an_answer(
    play: Play, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    settings: dict[str, object] = {"stall_timeout_s": 60.0, "load_timeout_s": 0.3}
    stage = play(settings=settings if "hang_on_adapter" in options else None, **options)
    if "hang_on_adapter" in options:  # the model itself may take its time
        stage.replica.model = stage.replica.model.model_copy(update={"load_timeout_s": 60.0})
    await stage.until("ready")
    if "hang_on_adapter" in options:
        stage.replica.model = stage.replica.model.model_copy(update=settings)
    outcome = await stage.replica.ask_to_load(adapter(tmp_path))
    assert isinstance(outcome, Refusal)
    assert outcome.died
    assert outcome.message.startswith("worker m/0 died while it loaded the adapter 'x': ")
    assert words in outcome.message
    stage.replica.model = stage.replica.model.model_copy(update={"load_timeout_s": 60.0})
    await stage.until("ready")


async def test_one_that_was_told_to_end_counts_for_nothing(play: Play, tmp_path: Path) -> None:
    stage = play(hang_on_adapter="x")
    await stage.until("ready")
    loading = asyncio.create_task(stage.replica.ask_to_load(adapter(tmp_path)))
    await asyncio.sleep(0)
    stage.replica.end_child(Stop(), 0.1)
    outcome = await asyncio.wait_for(loading, 10)
    assert isinstance(outcome, Refusal)
    assert outcome.left


# ---------------------------------------------------------------- stalls


async def request(stage: Stage, prompt: str) -> None:
    """Have the worker run a request, as a gateway would; its answer is of no interest."""
    connection = await dial_address(
        stage.replica.replica_status().socket,
        lambda: Connection(WorkerToGateway, lambda message: None, lambda error: None),
    )
    connection.send(Hello(PROTOCOL, "gateway", "test"))
    connection.send(Generate(1, SamplingParams(max_tokens=5), prompt=prompt))


async def watched(stage: Stage, state: str) -> None:
    """Look as often as the supervisor does, until it is so."""
    async with asyncio.timeout(15):
        while stage.replica.state != state:
            stage.replica.check_health()
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("holding_gil", [False, True])
async def test_a_worker_that_hangs_is_dumped_killed_and_replaced(
    play: Play, holding_gil: bool
) -> None:
    stage = play(settings={"stall_timeout_s": 0.6}, hang_on="poison", hang_holding_gil=holding_gil)
    await watched(stage, "ready")
    await request(stage, "poison")
    await watched(stage, "stalled")
    await watched(stage, "ready")
    (record,) = stage.replica.make_history().exits
    begins = "silent: no answer to a ping for" if holding_gil else "stalled: no progress for"
    assert record.what.startswith(begins)
    assert record.phase == "ready"
    assert any("most recent call first" in line for line in record.stacks)
    assert any("echo/engine.py" in line for line in record.stacks)
    assert not any("most recent call first" in line for line in record.tail)
    assert "stalled" in stage.host.states


async def test_a_stopped_worker_is_replaced_without_its_stacks(play: Play) -> None:
    stage = play(settings={"stall_timeout_s": 0.5})
    await watched(stage, "ready")
    os.kill(stage.replica.pid, signal.SIGSTOP)
    async with asyncio.timeout(15):
        while not stage.replica.restarts:
            stage.replica.check_health()
            await asyncio.sleep(0.01)
    assert "stalled" in stage.host.states
    (record,) = stage.replica.make_history().exits
    assert record.what.startswith("silent: no answer to a ping for 0.5")
    assert record.stacks == ()
    await watched(stage, "ready")


async def test_a_load_may_take_long_while_it_makes_progress(play: Play) -> None:
    # room for a busy machine in each, and longer than both
    stage = play(settings={"load_timeout_s": 3.0, "stall_timeout_s": 2.0}, load_s=7.0)
    await watched(stage, "ready")
    assert "stalled" not in stage.host.states
    assert stage.replica.restarts == 0


async def test_a_load_without_progress_is_ended(play: Play) -> None:
    stage = play(settings={"load_timeout_s": 1.0}, load_s=600)  # reports every 30 s
    await watched(stage, "stalled")
    assert "while loading" in stage.replica.reason
    await stage.host.until(lambda: stage.replica.restarts == 1)
    assert stage.replica.make_history().exits[0].phase == "loading"
