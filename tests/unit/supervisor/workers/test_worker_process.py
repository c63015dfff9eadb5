"""A worker as its supervisor has it, message by message: the test is the worker's process.

Real processes are in `test_sleep.py`, and in `test_managed_process.py` of `lifecycle`.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from servekit.config.schema import ModelConfig
from servekit.protocol.adapters import (
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    AdapterSpec,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from servekit.protocol.control.startup_messages import GATE
from servekit.protocol.messages import (
    BootFailed,
    EngineDied,
    Load,
    Loading,
    ModelInfo,
    Ping,
    Pong,
    Proceed,
    Progress,
    Ready,
    Stop,
)
from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.adapters.state import Refusal
from servekit.supervisor.deployments.deployment import Deployment, list_adapters
from servekit.supervisor.process.child_process import Exit
from servekit.supervisor.scheduling.gpu_admission import GpuAdmission
from servekit.supervisor.scheduling.gpu_reservations import GpuReservations
from servekit.supervisor.scheduling.memory_requests import Assignment
from servekit.supervisor.workers import worker_process as module
from servekit.supervisor.workers.gpu_memory import Entry
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system import procfs
from servekit.system.gpu.gpus import Gpu, Slot
from tests.polling import poll_async
from tests.unit.supervisor.lifecycle.test_managed_process import Host
from tests.unit.supervisor.scheduling.test_gpu_admission import GIB, GPUS, Nvml

INFO = ModelInfo(100, 2, True, "echo", "none", "cpu", generation="loaded")
SHELF = AdapterInfo("x", "LORA", "mixed", "it may")
WITH_SHELF = {"adapters": [{"name": "x", "path": "./x"}]}  # in the file


class Child:
    """A process that does as the test says, and keeps what it is sent."""

    here, forked, rss_bytes, started = True, False, 0, 1

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sent: list[msgspec.Struct] = []
        self.killed: list[str] = []
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    def kill(self, cause: str) -> None:
        self.killed.append(cause)

    async def dump_and_kill(self, cause: str) -> None:
        self.killed.append(f"after its stacks: {cause}")

    def note_segments(self) -> tuple[()]:
        return ()

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.sent if isinstance(one, kind)]


class Stage:
    """A worker with a place, and its life so far."""

    def __init__(self, folder: Path, slot: Slot = (), **keys: Any) -> None:
        self.host = Host(folder / "run")
        self.nvml = Nvml()
        self.gate = GpuAdmission(GpuReservations(GPUS), self.nvml.read, patience_s=0.05)
        facts = {"name": "m", "path": "p", "engine": "echo", **keys}
        model = ModelConfig.model_validate(facts)
        needs = (40 * GIB,) * len(slot)
        self.worker = self.host.replica = WorkerProcess(
            model,
            Assignment("m", 0, slot, 1, needs),
            GPUS,
            self.host,
            None,
            Adapters("m", list_adapters(model), cast(Deployment, self.host)),
            entry=Entry(self.gate, needs) if slot else None,
        )

    def start(self, pid: int = 7) -> Child:
        """Begin a life, as `ManagedProcess` does."""
        child = Child(pid)
        self.worker.change_state("start")
        self.worker._ready_at = None
        self.worker.command()
        self.worker.child = cast(Any, child)
        self.worker.send_greeting()
        return child

    def die(self, cause: str = "killed by SIGKILL") -> None:
        """End a life, as `ManagedProcess` does."""
        self.worker._died_of = cause
        child = cast(Child, self.worker.child)
        child.exited.set_result(Exit(None, 9, ()))
        self.worker.child = None
        self.worker.forget_child()
        self.worker.release_resources()
        self.worker.change_state("back off", cause)

    async def serve(self, pid: int = 7, *held: AdapterInfo) -> Child:
        child = self.start(pid)
        await self.come_up(*held)
        return child

    async def come_up(self, *held: AdapterInfo) -> None:
        info = msgspec.structs.replace(INFO, adapters=held)
        self.worker.receive(Ready(info, {"load": 1.5}))
        await poll_async("it serves", lambda: self.worker.state == "ready")


Make = Callable[..., Stage]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Stage] = []

    def make_one(*slot: Gpu, **keys: Any) -> Stage:
        made.append(Stage(tmp_path, slot, **keys))
        return made[-1]

    yield make_one
    for stage in made:
        stage.host.run_dir.unlock()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# ---------------------------------------------------------------- its start


async def test_a_worker_on_the_cpu_loads_at_once(make: Make) -> None:
    child = make().start()
    [load] = child.of(Load)
    assert load.spec.name == "m/0" and not load.waits
    assert child.of(Proceed) == []


async def test_each_life_has_a_socket_of_its_own(make: Make) -> None:
    stage = make()
    first = stage.start().of(Load)[0].spec
    assert stage.worker.address == first.socket != ""
    listening = await asyncio.start_unix_server(lambda reader, writer: None, first.socket)
    async with listening:
        assert os.access(first.socket, os.F_OK)
        stage.die()
    assert stage.worker.address == "" and not os.access(first.socket, os.F_OK)
    assert stage.start(8).of(Load)[0].spec.socket != first.socket


async def test_its_environment_has_the_models_variables(make: Make) -> None:
    command = make(env={"OWN": "1"}).worker.command()
    assert command.env["OWN"] == "1" and command.env["PATH"] == os.environ["PATH"]
    assert (command.name, command.module, command.args) == (
        "m/0",
        "servekit.worker",
        ("--name", "m/0"),
    )
    assert command.forked is None and command.python == ""


# ---------------------------------------------------------------- admission to its GPUs


async def test_a_worker_on_a_gpu_imports_and_loads_when_it_is_its_turn(make: Make) -> None:
    stage = make(GPUS[0])
    child = stage.start()
    [load] = child.of(Load)
    assert load.waits
    await poll_async("it may go on", lambda: child.of(Proceed))
    assert stage.worker.gpu.pid == 7
    assert stage.gate.ledger.claim_of("m/0") == {"GPU-0": 40 * GIB}


async def test_a_worker_that_is_not_admitted_ends_with_the_reason(make: Make) -> None:
    stage = make(GPUS[0])
    stage.nvml.held = {1: {"GPU-0": 90}}  # of another program, that stays
    child = stage.start()
    await poll_async("it is ended", lambda: child.killed)
    [reason] = child.killed
    assert "GPU 0 (H200)" in reason
    assert child.of(Proceed) == [] and stage.worker.gpu.pid == 0
    said = stage.worker._boot_failed
    assert said is not None and (said.message, said.permanent) == (reason, False)


@pytest.mark.parametrize("comes_up", [False, True])
async def test_where_its_start_cannot_be_checked_it_is_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, *, comes_up: bool
) -> None:
    """It is not left to wait for ever, as where no file was left to read /proc with."""
    stage = make(GPUS[0])
    child = stage.start()
    if comes_up:
        await poll_async("it may go on", lambda: child.of(Proceed))

    def all_pids() -> list[int]:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(procfs, "all_pids", all_pids)
        if comes_up:
            stage.worker.receive(Ready(INFO, {}))
        await poll_async("it is ended", lambda: child.killed)
    assert child.killed == ["OSError: [Errno 24] Too many open files"]
    said = stage.worker._boot_failed
    assert said is not None and not said.permanent
    assert logs == []


async def test_what_it_waits_for_is_shown_until_it_loads(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make()
    stage.start()
    published: list[Progress | None] = []
    with monkeypatch.context() as patch:
        patch.setattr(stage.host, "publish_change", lambda: published.append(stage.worker.progress))
        stage.worker.show_wait("waits for b/0 on GPU 0")
    assert published == [Progress("waits for b/0 on GPU 0")]
    assert stage.worker.progress == Progress("waits for b/0 on GPU 0")
    stage.worker.receive(Loading(Progress(GATE)))
    assert stage.worker.progress == Progress("waits for b/0 on GPU 0")
    assert stage.worker.make_history().reason.endswith("waits for b/0 on GPU 0")
    stage.worker.receive(Loading(Progress("load")))
    assert stage.worker.progress == Progress("load")
    stage.worker.show_wait("")
    assert stage.worker.state == "loading"


async def test_one_that_died_while_it_waited_is_not_admitted_in_its_next_life(make: Make) -> None:
    stage = make(GPUS[0])
    first = stage.start()
    stage.die()
    second = stage.start(8)
    await poll_async("the second may go on", lambda: second.of(Proceed))
    assert first.of(Proceed) == [] and stage.worker.gpu.pid == 8


# ---------------------------------------------------------------- ready


async def test_it_serves_with_what_it_has_told(make: Make) -> None:
    stage = make()
    child = await stage.serve()
    status = stage.worker.replica_status()
    assert (status.state, status.pid, status.timings_s) == ("ready", 7, {"load": 1.5})
    assert status.generation == stage.worker.generation == "loaded"
    assert status.progress is None and stage.worker.serves
    assert len(child.of(Ping)) == 1


async def test_while_it_does_not_serve_only_its_edition_is_known(make: Make) -> None:
    stage = make()
    before = stage.worker.generation
    assert before not in ("", "loaded")
    await stage.serve()
    stage.die()
    assert stage.worker.generation == before


async def test_a_report_that_comes_too_late_changes_nothing(make: Make) -> None:
    stage = make()
    child = await stage.serve()
    stage.worker.end_child(Stop(), 1.0)
    stage.worker.change_state("drain")
    stage.worker.receive(Loading(Progress("load")))
    stage.worker.receive(Ready(INFO, {}))
    await settle()
    assert (stage.worker.state, stage.worker.progress) == ("draining", None)
    assert len(child.of(Ping)) == 1


async def test_one_that_is_told_to_end_while_it_comes_up_does_not_serve(make: Make) -> None:
    stage = make()
    child = stage.start()
    stage.worker.receive(Ready(INFO, {}))
    stage.worker.end_child(Stop(), 1.0)
    await settle()
    assert stage.worker.state == "starting" and not stage.worker.serves
    assert child.killed == []


async def test_one_that_could_not_load_says_why_and_whether_to_try_again(make: Make) -> None:
    stage = make()
    stage.start()
    stage.worker.receive(BootFailed("no such file", True))
    said = stage.worker._boot_failed
    assert said is not None and (said.message, said.permanent) == ("no such file", True)


async def test_the_death_of_its_engine_is_told_by_itself(make: Make) -> None:
    stage = make()
    await stage.serve()
    stage.worker.receive(EngineDied("CUDA error"))
    assert (stage.worker.state, stage.worker.reason) == ("stalled", "CUDA error")


# ---------------------------------------------------------------- its death


async def test_nothing_that_a_dead_worker_held_is_counted_any_more(make: Make) -> None:
    stage = make(GPUS[0], **WITH_SHELF)
    child = stage.start()
    await poll_async("it may go on", lambda: child.of(Proceed))
    await stage.come_up(SHELF)
    stage.worker.measure_gpus({7: {"GPU-0": 50 * GIB, "GPU-1": GIB}})
    status = stage.worker.replica_status()
    assert status.gpu_bytes == 51 * GIB and status.held_bytes == (50 * GIB,)
    assert status.stray and status.excess and stage.worker.alert
    stage.die()
    status = stage.worker.replica_status()
    assert (status.gpu_bytes, status.held_bytes, status.stray, status.excess) == (0, (0,), "", "")
    assert (status.running, status.progress, stage.worker.alert) == (0, None, "")
    assert stage.worker.held_adapters == {}


async def test_one_that_dies_before_it_serves_starts_without_adapters(make: Make) -> None:
    """An adapter may be what kills it."""
    stage = make(**WITH_SHELF)
    assert [one.name for one in stage.start().of(Load)[0].spec.adapters] == ["x"]
    stage.die()
    child = stage.start(8)
    assert child.of(Load)[0].spec.adapters == ()
    stage.worker.receive(Ready(INFO, {}))
    await poll_async("it gets the adapter", lambda: child.of(LoadAdapter))
    stage.worker.receive(AdapterLoaded(child.of(LoadAdapter)[0].seq, SHELF))
    await poll_async("it serves", lambda: stage.worker.state == "ready")
    stage.die()
    assert [one.name for one in stage.start(9).of(Load)[0].spec.adapters] == ["x"]


# ---------------------------------------------------------------- health


@pytest.mark.parametrize(
    ("timeouts", "is_due"),
    [({}, False), ({"stall_timeout_s": 0.0001}, True), ({"load_timeout_s": 0.0001}, True)],
)
async def test_it_is_asked_now_and_then_but_often_enough_for_its_timeouts(
    make: Make, timeouts: dict[str, float], is_due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PING_EVERY_S", 600.0)
    stage = make(**timeouts)
    child = await stage.serve()
    stage.worker.receive(Pong(1, 0.0, 0, 0, 0.0))
    began = asyncio.get_running_loop().time()
    await poll_async("the clock goes on", lambda: asyncio.get_running_loop().time() > began)
    stage.worker.check_health()
    assert [ping.seq for ping in child.of(Ping)] == ([1, 2] if is_due else [1])


async def test_one_without_progress_is_killed_once_after_its_stacks(make: Make) -> None:
    stage = make(stall_timeout_s=60.0)
    child = await stage.serve()
    stage.worker.receive(Pong(1, 59.0, 1, 0, 0.0))
    stage.worker.check_health()
    assert stage.worker.state == "ready"
    stage.worker.receive(Pong(2, 61.0, 1, 0, 0.0))
    stage.worker.check_health()
    stage.worker.check_health()
    await settle()
    said = "stalled: no progress for 61.0 s with 1 request running"
    assert (stage.worker.state, stage.worker.reason, stage.worker.stalls) == ("stalled", said, 1)
    assert child.killed == [f"after its stacks: {said}"]


async def test_one_that_is_told_to_end_is_left_to_its_grace_time(make: Make) -> None:
    stage = make(stall_timeout_s=60.0)
    child = await stage.serve()
    stage.worker.end_child(Stop(), 1.0)
    stage.worker.receive(Pong(1, 99.0, 1, 0, 0.0))
    stage.worker.check_health()
    stage.worker.give_up("it is slow")
    await settle()
    assert (stage.worker.stalls, child.killed) == (0, [])


async def test_a_suspension_of_the_supervisor_is_not_blamed_on_it(make: Make) -> None:
    stage = make(stall_timeout_s=60.0)
    child = await stage.serve()
    stage.worker.receive(Pong(1, 99.0, 1, 0, 0.0))
    stage.worker.forgive_suspension()
    stage.worker.check_health()
    await settle()
    assert child.killed == []


async def test_an_adapter_may_take_as_long_as_a_models_load(make: Make) -> None:
    stage = make(stall_timeout_s=5.0, load_timeout_s=90.0)
    child = await stage.serve()
    asking = asyncio.create_task(stage.worker.ask_to_load(AdapterSpec("x", "./x")))
    await settle()
    stage.worker.receive(Pong(1, 80.0, 1, 0, 0.0))
    stage.worker.check_health()
    assert stage.worker.state == "ready"
    [request] = child.of(LoadAdapter)
    stage.worker.receive(AdapterLoaded(request.seq, SHELF))
    assert await asking == SHELF
    stage.worker.check_health()
    assert stage.worker.state == "ready", "its pongs do not tell of the time since, yet"


async def test_what_it_counts_is_told_by_its_last_answer(make: Make) -> None:
    stage = make()
    await stage.serve()
    last = Pong(1, 0.0, 3, 2, 0.51, served=9, trouble="its endpoint is away", finished=4)
    stage.worker.receive(last)
    assert (stage.worker.load(), stage.worker.use()) == ((4, 3), 9)
    status = stage.worker.replica_status()
    assert (status.running, status.waiting, status.kv_used) == (3, 2, 0.51)
    assert status.trouble == stage.worker.make_history().reason == "its endpoint is away"
    stage.worker.change_state("sleep")
    assert stage.worker.trouble == "", "only one that serves is in trouble"


# ---------------------------------------------------------------- memory on other GPUs


@pytest.mark.parametrize(("what", "killed"), [("alert", []), ("fail", ["it holds 1.0 GiB on "])])
async def test_a_stray_is_told_or_the_worker_is_replaced(
    make: Make, what: str, killed: list[str]
) -> None:
    stage = make(GPUS[0], stray_memory=what)
    child = stage.start()
    await poll_async("it may go on", lambda: child.of(Proceed))
    strays = {7: {"GPU-0": GIB, "GPU-1": GIB}}
    stage.worker.measure_gpus(strays)
    assert child.killed == [], "it does not serve yet"
    await stage.come_up()
    with capture_logs() as logs:
        for _ in range(2):
            stage.worker.gpu.stray = ""  # as if it held nothing there a moment ago
            stage.worker.measure_gpus(strays)
            stage.worker.measure_gpus(strays)
    assert [log["event"] for log in logs] == ["gpu_memory_stray"] * 2, "once as long as it lasts"
    killed = [*killed, *killed] * 2  # whatever ends it may take a while
    assert [cause[: len("it holds 1.0 GiB on ")] for cause in child.killed] == killed
    assert "GPU 1 (H200)" in stage.worker.alert


# ---------------------------------------------------------------- adapters


async def test_adapters_come_and_go_by_its_answers(make: Make) -> None:
    stage = make()
    child = await stage.serve()
    loading = asyncio.create_task(stage.worker.ask_to_load(AdapterSpec("x", "./x")))
    await settle()
    stage.worker.receive(AdapterLoaded(child.of(LoadAdapter)[0].seq, SHELF))
    assert await loading == SHELF
    assert stage.worker.held_adapters == {"x": SHELF}
    unloading = asyncio.create_task(stage.worker.ask_to_unload("x"))
    await settle()
    stage.worker.receive(AdapterUnloaded(child.of(UnloadAdapter)[0].seq, "x"))
    assert await unloading
    assert stage.worker.held_adapters == {} and child.killed == []


async def test_an_adapter_that_it_refuses_is_not_held(make: Make) -> None:
    stage = make()
    child = await stage.serve()
    loading = asyncio.create_task(stage.worker.ask_to_load(AdapterSpec("x", "./x")))
    await settle()
    stage.worker.receive(AdapterRefused(child.of(LoadAdapter)[0].seq, "wrong base", True))
    assert await loading == Refusal("wrong base", True)
    assert stage.worker.held_adapters == {} and child.killed == []


async def test_one_that_cannot_unload_an_adapter_is_replaced(make: Make) -> None:
    stage = make(**WITH_SHELF)
    child = await stage.serve(7, SHELF)
    unloading = asyncio.create_task(stage.worker.ask_to_unload("x"))
    await settle()
    stage.worker.receive(AdapterRefused(child.of(UnloadAdapter)[0].seq, "it is in use", False))
    assert not await unloading
    assert child.killed == ["it could not unload the adapter 'x': it is in use"]


async def test_one_that_is_not_there_answers_no_request(make: Make) -> None:
    stage = make()
    for prepare in (lambda: None, lambda: stage.worker.change_state("stall")):
        prepare()
        refusal = await stage.worker.ask_to_load(AdapterSpec("x", "./x"))
        assert isinstance(refusal, Refusal) and refusal.died and refusal.left
        assert "worker m/0 died before it loaded the adapter 'x'" in refusal.message
    assert await stage.worker.wake() == "worker m/0 is stalled"


async def test_a_request_is_answered_by_its_death(make: Make) -> None:
    stage = make()
    child = await stage.serve()
    loading = asyncio.create_task(stage.worker.ask_to_load(AdapterSpec("x", "./x")))
    await settle()
    stage.die("killed by SIGSEGV")
    refusal = await loading
    assert isinstance(refusal, Refusal) and refusal.died and not refusal.left
    assert refusal.message == ("worker m/0 died while it loaded the adapter 'x': killed by SIGSEGV")
    assert child.killed == []
