"""The life of a worker, with an engine that does only the steps that the test makes it do.

The supervisor is the other end of a real control socket, gateways come to a real Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from servekit.engines.api import load_phases
from servekit.engines.api.base import Engine, Job, Load, Report, StepOutput
from servekit.engines.api.text_engine import TextEngine, TextJob
from servekit.engines.echo.run import EchoCodec
from servekit.errors import EngineFailed, LoadError, WorkerLost
from servekit.protocol.control.startup_messages import GATE
from servekit.protocol.forwarding import HttpRequest
from servekit.protocol.messages import (
    PROTOCOL,
    BootFailed,
    DeltaBatch,
    Drain,
    EngineDied,
    Failed,
    FromWorker,
    Generate,
    Hello,
    Loading,
    ModelInfo,
    Ping,
    Pong,
    Proceed,
    Progress,
    Ready,
    SamplingParams,
    Stop,
    TokenBatch,
    WorkerSpec,
    WorkerToGateway,
)
from servekit.protocol.messages import Load as LoadModel
from servekit.protocol.residency import Asleep, Awake, Sleep, Wake
from servekit.protocol.transport.connection import Connection, adopt_socket, dial_address
from servekit.worker import worker as module
from servekit.worker.runner import Runner
from servekit.worker.transport import InheritedChannel
from servekit.worker.worker import EXIT_BOOT_FAILED, EXIT_ENGINE_DIED, TOKENS_OF_USE, Worker
from tests.unit.gateway.conftest import DEADLINE_S, until
from tests.unit.worker.serving import spec

#: The prompt of the worker's own requests.
PROBE = "Hello"


class Puppet(Engine):
    """An engine that answers probes by itself where `answers`, and all else step by step."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.codec = EchoCodec()
        self.vocab_size = 2**16
        self.answers = True
        self.refuses = False
        self.load_error: Exception | None = None
        self.progress: list[Progress] = []
        self.jobs: dict[str, Job] = {}  # those under way, by prompt
        self.submitted: list[str] = []
        self.max_tokens: list[int | None] = []  # of each
        self.closed = False
        self.asleep = False
        self.loaded = False

    def load(self, report: Report) -> ModelInfo:
        self.loaded = True
        for progress in self.progress:
            report(progress)
        if self.load_error is not None:
            raise self.load_error
        return ModelInfo(10**6, 8, True, "puppet", "none", "cpu", sleeps=True)

    def identify(self, *, portable: bool = False) -> str:
        return ""

    def start(self, emit: Any) -> None:
        self._emit = emit

    def submit(self, job: Job) -> None:
        prompt = "".join(map(chr, job.prompt_ids))
        self.submitted.append(prompt)
        self.max_tokens.append(job.params.max_tokens)
        if self.refuses:
            raise EngineFailed("it takes nothing")
        self.jobs[prompt] = job
        if self.answers and prompt == PROBE:
            self.step(prompt, 1, ends=True)

    def cancel(self, job_id: int) -> None:
        self.jobs = {prompt: job for prompt, job in self.jobs.items() if job.id != job_id}

    def step(self, prompt: str, tokens: int, *, ends: bool = False) -> None:
        job = self.jobs.pop(prompt) if ends else self.jobs[prompt]
        self._emit([StepOutput(job.id, [97] * tokens, "stop" if ends else None)])

    def load_now(self) -> Load:
        return Load(len(self.jobs), 0, 0.0, 0.0)

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def close(self) -> None:
        self.closed = True


class TextPuppet(TextEngine):
    """An engine that looks after itself."""

    trouble = "the endpoint is away"

    def load(self, report: Report) -> ModelInfo:
        return ModelInfo(10**6, 8, True, "text", "none", "remote")

    def identify(self, *, portable: bool = False) -> str:
        return ""

    def start(self, emit: Any) -> None:
        pass

    def ask(self, job: TextJob) -> None:
        raise AssertionError("an answer that may cost money")

    def cancel(self, job_id: int) -> None:
        pass

    def load_now(self) -> Load:
        return Load(0, 0, 0.0, 0.0)

    def close(self) -> None:
        pass


class Scene:
    """A worker, its supervisor's end of the control socket, and a gateway."""

    def __init__(self, folder: Path, engine: Engine | None = None) -> None:
        self.spec = spec(folder)
        self.engine: Any = Puppet(self.spec) if engine is None else engine
        self.heard: list[FromWorker] = []
        self.told: list[WorkerToGateway] = []
        self.gateway: Connection[WorkerToGateway] | None = None
        self.gateway_lost = False

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        self.control: Connection[FromWorker] = Connection(
            FromWorker, self.heard.append, lambda error: None
        )
        await adopt_socket(ours, lambda: self.control)
        self.worker = Worker("m/0", InheritedChannel(theirs), time.monotonic())
        self.exit = asyncio.ensure_future(self.worker.run())

    async def boot(self) -> None:
        """Until it is ready."""
        self.control.send(LoadModel(self.spec))
        await until(lambda: self.of(Ready) or self.exit.done())
        assert self.of(Ready), self.heard

    async def connect(self) -> None:
        self.gateway = await dial_address(
            self.spec.socket,
            lambda: Connection(WorkerToGateway, self.told.append, self._on_lost),
        )
        self.gateway.send(Hello(PROTOCOL, "gateway", "g"))

    def _on_lost(self, error: Exception | None) -> None:
        self.gateway_lost = True

    async def ask(self, prompt: str) -> None:
        """Until the engine has it."""
        if self.gateway is None:
            await self.connect()
        assert self.gateway is not None
        self.gateway.send(Generate(1, SamplingParams(max_tokens=100), prompt=prompt))
        await until(lambda: prompt in self.engine.jobs)

    async def ping(self) -> Pong:
        """The answer; all that was sent before it has been heard."""
        seq = 1000 + len(self.heard)
        self.control.send(Ping(seq))
        await until(lambda: any(pong.seq == seq for pong in self.of(Pong)))
        [pong] = [one for one in self.heard if isinstance(one, Pong) and one.seq == seq]
        return pong

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def answered(self) -> int:
        """How many tokens the gateway has got."""
        return sum(
            sum(len(delta.token_ids) for delta in message.deltas)
            if isinstance(message, DeltaBatch)
            else len(message.ids)
            for message in self.told
            if isinstance(message, DeltaBatch | TokenBatch)
        )

    async def code(self) -> int:
        return await asyncio.wait_for(asyncio.shield(self.exit), DEADLINE_S)

    async def end(self) -> None:
        self.worker._set_exit(0)
        with contextlib.suppress(asyncio.CancelledError):
            await self.exit
        for task in (self.worker._probe_task, self.worker._boot_task):
            if task is not None:
                task.cancel()
        if self.gateway is not None:
            self.gateway.abort()
        self.control.abort()


@pytest.fixture
def group_ends(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """How often the worker has ended its process group, which is the tests' own."""
    ends: list[bool] = []
    monkeypatch.setattr(module, "end_group", lambda: ends.append(True))
    return ends


Start = Callable[..., Any]


@pytest.fixture
async def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_ends: list[bool]
) -> AsyncIterator[Start]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    scenes: list[Scene] = []
    monkeypatch.setattr(module, "PROBE_EVERY_S", 3600.0)  # it would find out what others are to

    async def start(engine: type[Engine] = Puppet) -> Scene:
        scene = Scene(tmp_path, engine(spec(tmp_path)))
        monkeypatch.setattr(module, "create_engine", lambda spec: scene.engine)
        scenes.append(scene)
        await scene.start()
        return scene

    yield start
    for scene in scenes:
        await scene.end()
    load_phases.heard_by(None)
    for number, handler in handlers.items():
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, handler)


# ---------------------------------------------------------------- ready


async def test_ready_is_said_after_a_warm_up_token(start: Start) -> None:
    scene = await start()
    scene.engine.answers = False
    scene.control.send(LoadModel(scene.spec))
    await until(lambda: scene.engine.submitted or scene.of(Ready))
    await scene.ping()
    assert scene.engine.submitted == [PROBE] and not scene.of(Ready)
    scene.engine.step(PROBE, 1)
    await scene.ping()
    assert not scene.of(Ready)
    scene.engine.step(PROBE, 1, ends=True)
    await until(lambda: scene.of(Ready))
    [ready] = scene.of(Ready)
    assert {"import", "load", "warm-up"} <= ready.timings_s.keys()


async def waits_for_its_turn(start: Start) -> Scene:
    scene: Scene = await start()
    scene.control.send(LoadModel(scene.spec, waits=True))
    await until(lambda: any(one.progress.phase == GATE for one in scene.of(Loading)))
    return scene


async def test_it_waits_for_its_turn_with_its_engine_imported(start: Start) -> None:
    scene = await waits_for_its_turn(start)
    scene.worker._progress_at -= 3600.0  # it has waited for an hour
    assert (await scene.ping()).progress_age_s == 0.0
    assert not scene.engine.loaded
    scene.control.send(Proceed())
    await until(lambda: scene.of(Ready))
    [ready] = scene.of(Ready)
    assert list(ready.timings_s)[:3] == ["import", GATE, "load"]


async def test_with_its_turn_come_already_it_waits_for_nothing(start: Start) -> None:
    scene = await start()
    scene.control.send(LoadModel(scene.spec, waits=True))
    scene.control.send(Proceed())
    await until(lambda: scene.of(Ready))
    assert GATE not in scene.of(Ready)[0].timings_s


async def test_a_worker_that_waits_exits_at_drain(start: Start) -> None:
    scene = await waits_for_its_turn(start)
    scene.control.send(Drain())
    assert await scene.code() == 0
    assert not scene.engine.loaded


async def test_a_warm_up_that_fails_is_a_failed_boot(start: Start) -> None:
    scene = await start()
    scene.engine.refuses = True
    scene.control.send(LoadModel(scene.spec))
    assert await scene.code() == EXIT_BOOT_FAILED
    await until(lambda: scene.of(BootFailed))
    assert scene.of(BootFailed) == [
        BootFailed("the warm-up request failed: it takes nothing", False)
    ]
    assert not scene.of(Ready)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LoadError("there is no such model"), BootFailed("there is no such model", True)),
        (LoadError("the disk is full", permanent=False), BootFailed("the disk is full", False)),
        (KeyError("layer"), BootFailed("KeyError: 'layer'", False)),
    ],
)
async def test_a_model_that_cannot_be_loaded(
    start: Start, error: Exception, told: BootFailed
) -> None:
    scene = await start()
    scene.engine.load_error = error
    scene.control.send(LoadModel(scene.spec))
    assert await scene.code() == EXIT_BOOT_FAILED
    await until(lambda: scene.of(BootFailed))
    assert scene.of(BootFailed) == [told]
    assert not scene.engine.closed, "what is not loaded is not closed"


async def test_a_socket_that_cannot_be_made_is_a_failed_boot(start: Start, tmp_path: Path) -> None:
    scene = await start()
    scene.control.send(LoadModel(replace(scene.spec, socket=str(tmp_path / "none" / "s"))))
    assert await scene.code() == EXIT_BOOT_FAILED
    await until(lambda: scene.of(BootFailed))
    [failed] = scene.of(BootFailed)
    assert failed.message.startswith("cannot listen on") and not failed.permanent


async def test_progress_is_told_ten_times_a_second(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last of a phase always."""
    monkeypatch.setattr(module, "REPORT_EVERY_S", 3600.0)
    scene = await start()
    scene.engine.progress = [Progress("weights", done, 100) for done in range(101)]
    await scene.boot()
    told = [message.progress for message in scene.of(Loading)]
    assert [one.done for one in told if one.phase == "weights"] == [0, 100]
    assert [one.phase for one in told] == ["import", "weights", "weights", "warm-up"]


async def test_a_worker_that_loads_answers_pings_with_the_age_of_its_progress(start: Start) -> None:
    scene = await start()
    first = await scene.ping()
    second = await scene.ping()
    assert 0 <= first.progress_age_s < second.progress_age_s
    assert (first.running, first.served) == (0, 0)


async def test_an_engine_that_watches_itself_is_not_asked(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.01)
    scene = await start(TextPuppet)
    await scene.boot()
    assert "warm-up" not in [message.progress.phase for message in scene.of(Loading)]
    assert scene.worker._probe_task is None
    assert (await scene.ping()).trouble == "the endpoint is away"


# ---------------------------------------------------------------- probes


async def test_an_idle_worker_sends_itself_a_request(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(module, "PROBE_SHARE", 1.0)
    scene = await start()
    await scene.boot()
    await until(lambda: len(scene.engine.submitted) >= TOKENS_OF_USE + 2)
    assert set(scene.engine.submitted) == {PROBE}
    assert (await scene.ping()).served == 0, "its own requests are of no use to anybody"
    # a token is enough to see that the engine lives; now and then it decodes, too
    assert scene.engine.max_tokens[:9] == [2, 1, 1, 1, 2, 1, 1, 1, 2]


async def test_a_slow_model_at_rest_is_asked_seldom(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(duration_s: float) -> None:
        waits.append(duration_s)
        await asyncio.Event().wait()

    scene = await start()
    monkeypatch.setattr("servekit.worker.worker.asyncio.sleep", sleep)
    monkeypatch.setattr(module, "PROBE_EVERY_S", 1e-6)
    monkeypatch.setattr(module, "PROBE_SHARE", 1e-3)
    scene.control.send(LoadModel(scene.spec))
    async with asyncio.timeout(DEADLINE_S):
        while scene.worker._probe_s / 1e-3 not in waits:
            await asyncio.wait((scene.exit,), timeout=0.002)
    assert 0 < scene.worker._probe_s < DEADLINE_S


async def test_a_busy_worker_sends_itself_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    go_on = asyncio.Event()

    async def sleep(duration_s: float) -> None:
        waits.append(duration_s)
        await go_on.wait()
        go_on.clear()

    scene = await start()
    monkeypatch.setattr("servekit.worker.worker.asyncio.sleep", sleep)
    scene.control.send(LoadModel(scene.spec))
    async with asyncio.timeout(DEADLINE_S):
        while module.PROBE_EVERY_S not in waits:
            await asyncio.wait((scene.exit,), timeout=0.002)
        scene.gateway = await dial_address(
            scene.spec.socket, lambda: Connection(WorkerToGateway, scene.told.append, print)
        )
        scene.gateway.send(Hello(PROTOCOL, "gateway", "g"))
        scene.gateway.send(Generate(1, SamplingParams(max_tokens=9), prompt="long"))
        while "long" not in scene.engine.jobs:
            await asyncio.wait((scene.exit,), timeout=0.002)
        for turn in range(2, 4):
            go_on.set()
            while waits.count(module.PROBE_EVERY_S) < turn:
                await asyncio.wait((scene.exit,), timeout=0.002)
    assert scene.engine.submitted == [PROBE, "long"]


async def test_a_probe_that_fails_is_the_engines_death(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(module, "PROBE_SHARE", 1.0)
    scene = await start()
    await scene.boot()
    scene.engine.refuses = True
    assert await scene.code() == EXIT_ENGINE_DIED
    await until(lambda: scene.of(EngineDied))
    [died] = scene.of(EngineDied)
    assert died.cause == "the health probe failed: the warm-up request failed: it takes nothing"


async def test_asleep_it_is_not_probed_and_awake_only_after_a_token(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await start()
    await scene.boot()
    scene.control.send(Sleep())
    await until(lambda: scene.of(Asleep))
    assert scene.engine.asleep and scene.engine.submitted == [PROBE]
    scene.engine.answers = False
    scene.control.send(Wake())
    await until(lambda: len(scene.engine.submitted) == 2 or scene.of(Awake))
    await scene.ping()
    assert not scene.engine.asleep and not scene.of(Awake)
    scene.engine.step(PROBE, 1, ends=True)
    await until(lambda: scene.of(Awake))


# ---------------------------------------------------------------- of use


async def test_a_life_of_use_is_told_unasked(start: Start) -> None:
    scene = await start()
    await scene.boot()
    await scene.ask("long")
    scene.engine.step("long", TOKENS_OF_USE - 1)  # the warm-up had one more, which does not count
    await scene.ping()
    assert all(pong.served == 0 for pong in scene.of(Pong))
    scene.engine.step("long", 1)
    await until(lambda: any(pong.seq == 0 and pong.served == 1 for pong in scene.of(Pong)))
    scene.engine.step("long", 1, ends=True)
    assert (await scene.ping()).served == 1


# ---------------------------------------------------------------- the engine's death


async def test_a_dead_engine_ends_its_worker(start: Start) -> None:
    scene = await start()
    await scene.boot()
    await scene.ask("under way")
    scene.engine.step("under way", 3)
    scene.engine.fatal = RuntimeError("it broke\nand more")
    assert await scene.code() == EXIT_ENGINE_DIED
    await until(lambda: scene.of(EngineDied) and scene.gateway_lost)
    [died] = scene.of(EngineDied)
    assert "it broke" in died.cause
    assert scene.answered() == 3, "what its steps brought is out"
    assert not any(isinstance(message, Failed) for message in scene.told), "it goes on elsewhere"
    assert not scene.engine.closed, "a broken device may hang"


class Threaded(Puppet):
    """A puppet with a loop of its own, which breaks at a word."""

    breaks_at_once = False

    def start(self, emit: Any) -> None:
        super().start(emit)
        self.broken = threading.Event()
        threading.Thread(target=self._break, daemon=True).start()
        if self.breaks_at_once:
            self.broken.set()

    def _break(self) -> None:
        self.broken.wait()
        raise IndexError("index 7 is out of bounds")


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_error_in_the_engines_thread_is_its_death_and_its_traceback_logged(
    start: Start, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(Threaded, "breaks_at_once", at_once)
    with capture_logs() as logged:
        scene = await start(Threaded)
        if at_once:
            scene.control.send(LoadModel(scene.spec))
        else:
            await scene.boot()
            scene.engine.broken.set()
        assert await scene.code() == EXIT_ENGINE_DIED
        await until(lambda: scene.of(EngineDied))
    assert scene.of(EngineDied)[0].cause == "IndexError: index 7 is out of bounds"
    [died] = [entry for entry in logged if entry["event"] == "engine_died"]
    frames = traceback.extract_tb(died["exc_info"].__traceback__)
    assert frames[-1].name == "_break"


async def test_an_error_in_another_thread_is_not_the_engines_death(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    scene = await start(Threaded)
    await scene.boot()
    other = threading.Thread(target=lambda: 1 / 0)
    other.start()
    other.join()
    assert [args.exc_type for args in heard] == [ZeroDivisionError]
    assert scene.engine.fatal is None
    assert (await scene.ping()).running == 0


async def test_at_rest_only_its_own_request_wakes_a_worker(start: Start) -> None:
    scene = await start()
    await scene.boot()
    await scene.ping()
    loop: Any = asyncio.get_running_loop()
    waits_s = [one.when() - loop.time() for one in loop._scheduled if not one.cancelled()]
    assert len(waits_s) == 1 and waits_s[0] > module.PROBE_EVERY_S / 2


async def test_a_socket_that_was_removed_is_there_again_after_a_ping(start: Start) -> None:
    scene = await start()
    await scene.boot()
    Path(scene.spec.socket).unlink()  # noqa: ASYNC240
    await scene.ping()
    await until(Path(scene.spec.socket).is_socket)
    await scene.ask("long")
    Path(scene.spec.socket).unlink()  # noqa: ASYNC240
    await scene.worker._send_probe(scene.of(Ready)[0].info)  # it dials itself, before any ping


async def test_a_death_that_nobody_told_of_is_seen_by_the_next_ping(start: Start) -> None:
    scene = await start()
    await scene.boot()
    scene.engine.on_death = None
    scene.engine.fatal = RuntimeError("it broke")
    scene.control.send(Ping(1))
    assert await scene.code() == EXIT_ENGINE_DIED
    await until(lambda: scene.of(EngineDied))
    assert [died.cause for died in scene.of(EngineDied)] == ["RuntimeError: it broke"]


async def test_a_ping_between_load_and_start_does_not_reach_the_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await start()
    identifying, may_go_on = threading.Event(), threading.Event()

    def identify(*_: Any) -> None:
        identifying.set()
        may_go_on.wait(DEADLINE_S)

    monkeypatch.setattr(Runner, "identify_adapters", identify)
    monkeypatch.setattr(scene.engine, "load_now", lambda: pytest.fail("it has not started"))
    scene.control.send(LoadModel(scene.spec))
    await until(identifying.is_set)
    assert (await scene.ping()).running == 0
    monkeypatch.undo()
    may_go_on.set()
    await until(lambda: scene.of(Ready))


async def test_a_death_while_it_loads_is_told_once(start: Start) -> None:
    scene = await start()
    scene.engine.answers = False
    scene.control.send(LoadModel(scene.spec))
    await until(lambda: scene.engine.submitted)
    scene.engine.fatal = RuntimeError("it broke")
    assert await scene.code() == EXIT_ENGINE_DIED
    await until(lambda: scene.of(EngineDied))
    assert not scene.of(BootFailed)


# ---------------------------------------------------------------- the end


async def test_a_busy_worker_finishes_before_it_exits_at_drain(start: Start) -> None:
    scene = await start()
    await scene.boot()
    await scene.ask("under way")
    scene.control.send(Drain())
    await until(lambda: scene.worker._runner is not None and scene.worker._runner.draining)
    scene.engine.step("under way", 5)
    await until(lambda: scene.answered() == 5 or scene.exit.done())
    assert not scene.exit.done()
    scene.engine.step("under way", 2, ends=True)
    assert await scene.code() == 0
    await until(lambda: scene.gateway_lost)
    assert scene.answered() == 7, "the last of it is out"
    assert scene.engine.closed


async def test_an_idle_worker_exits_at_drain(start: Start) -> None:
    scene = await start()
    await scene.boot()
    scene.control.send(Drain())
    assert await scene.code() == 0
    assert scene.engine.closed


async def test_an_idle_worker_gives_back_what_arrives_at_drain(start: Start) -> None:
    scene = await start()
    await scene.boot()
    await scene.connect()
    assert scene.gateway is not None and scene.worker._runner is not None
    upload = HttpRequest("/v1/x", size_bytes=9)
    scene.gateway.send(Generate(1, SamplingParams(), http=upload, body=b"a part"))
    await until(lambda: any(one._incomplete for one in scene.worker._runner.peers))
    scene.control.send(Drain())
    assert await scene.code() == 0
    await until(lambda: scene.gateway_lost)
    [failed] = [one for one in scene.told if isinstance(one, Failed)]
    assert (failed.id, failed.code) == (1, WorkerLost.code)


async def test_a_worker_that_loads_exits_at_drain(start: Start) -> None:
    scene = await start()
    scene.control.send(Drain())
    assert await scene.code() == 0


async def test_a_busy_worker_exits_at_stop(start: Start) -> None:
    scene = await start()
    await scene.boot()
    await scene.ask("under way")
    scene.control.send(Stop())
    assert await scene.code() == 0


async def test_without_its_supervisor_it_ends_all_that_it_has_started(
    start: Start, group_ends: list[bool]
) -> None:
    scene = await start()
    await scene.boot()
    scene.control.abort()
    await until(lambda: group_ends)


async def test_a_supervisor_that_goes_after_the_end_is_nothing(
    start: Start, group_ends: list[bool]
) -> None:
    scene = await start()
    await scene.boot()
    scene.control.send(Stop())
    assert await scene.code() == 0
    scene.control.abort()
    await scene.end()
    assert not group_ends
