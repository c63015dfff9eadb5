"""The life of a worker: load the engine, listen, warm up, say Ready, serve, drain.

starting ── Load ──▶ loading ── warm-up token came back ──▶ ready ── Drain ──▶ draining ──▶ 0
    └── error ──▶ BootFailed, exit 3         │ ▲ └── engine died ──▶ exit 70
                                       Sleep ▼ │ Wake, and a token
                                            asleep
EOF on the control connection at any time: the process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import structlog

from servekit.engines import create
from servekit.engines.base import Engine, StepOutput
from servekit.engines.text import TextEngine
from servekit.errors import LoadError
from servekit.wire.adapters import LoadAdapter, UnloadAdapter
from servekit.wire.connection import Connection, adopt, dial, listen
from servekit.wire.lifeline import end_group
from servekit.wire.messages import (
    PROTOCOL,
    BootFailed,
    Drain,
    Failed,
    Generate,
    Hello,
    Load,
    Loading,
    ModelInfo,
    Ping,
    Pong,
    Progress,
    Ready,
    SamplingParams,
    Stop,
    Tokens,
    ToWorker,
    WorkerSpec,
    WorkerToGateway,
)
from servekit.wire.residency import Sleep, Wake
from servekit.worker.adapters import Adapters
from servekit.worker.runner import Runner
from servekit.worker.slumber import Slumber

log: Any = structlog.get_logger("servekit.worker")

EXIT_BOOT_FAILED = 3
EXIT_ENGINE_DIED = 70
#: Progress is reported at most this often.
REPORT_EVERY_S = 0.1
#: A worker that has completed nothing for this long sends itself a request.
PROBE_EVERY_S = 15.0
#: So many tokens are worth a completed request, to the policy that restarts workers: a few steps
#: of decoding have gone well then, and some client has what they brought.
TOKENS_OF_USE = 8


def run(name: str, control: socket.socket) -> int:
    """Run a worker until it is told to stop; returns the exit code."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_live(name, control))


async def _live(name: str, control: socket.socket) -> int:
    return await Worker(name).live(control)


class Worker:
    """One worker process. All state is written on the event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._control: Connection[ToWorker] = Connection(ToWorker, self._on_message, self._on_eof)
        self._boot_task: asyncio.Task[None] | None = None
        self._probe_task: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._runner: Runner | None = None
        self._adapters: Adapters | None = None
        self._slumber: Slumber | None = None
        self._server: asyncio.Server | None = None
        self._timings_s: dict[str, float] = {}
        self._reported = ("", 0.0)  # phase and time of the last progress report
        self._progress_at = time.monotonic()
        self._finished = 0  # requests the engine has completed, probes included
        self._tokens = 0
        self._probes = 0
        self._of_use = False  # as the supervisor has been told, unasked

    async def live(self, control: socket.socket) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._end, 0)
        await adopt(control, lambda: self._control)
        code = await self._exit
        if self._engine is not None and code != EXIT_BOOT_FAILED:
            self._engine.close()
        self._control.close()
        return code

    def _end(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    # ---- from the supervisor

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case Load(spec):
                self._boot_task = self._loop.create_task(self._boot(spec))
            case Ping(seq):
                self._control.send(self._pong(seq))
            case Drain():
                self._drain()
            case Stop():
                self._end(0)
            case LoadAdapter() | UnloadAdapter():
                assert self._adapters is not None  # they come after Ready
                self._adapters.take(message)
            case Sleep() | Wake():
                assert self._slumber is not None  # as they
                self._slumber.take(message)

    def _on_eof(self, error: Exception | None) -> None:
        if not self._exit.done():
            log.error("the supervisor is gone", error=str(error or "EOF"))
            end_group()

    def _pong(self, seq: int) -> Pong:
        if self._runner is None or self._engine is None:
            return Pong(seq, time.monotonic() - self._progress_at, 0, 0, 0.0)
        if self._engine.fatal is not None:
            log.error("the engine died", error=repr(self._engine.fatal))
            self._end(EXIT_ENGINE_DIED)
        now = self._engine.load_now()
        running, waiting = now.running, now.waiting
        trouble = self._engine.trouble if isinstance(self._engine, TextEngine) else ""
        return Pong(seq, now.progress_age_s, running, waiting, now.kv_used, self._served, trouble)

    @property
    def _served(self) -> int:
        # A long answer counts before its end, so that a life cut short by chance was of use.
        return max(self._finished - self._probes, self._tokens // TOKENS_OF_USE, 0)

    def _drain(self) -> None:
        if self._runner is None:
            self._end(0)
            return
        self._runner.draining = True
        if not self._runner.busy:
            self._end(0)

    # ---- boot

    async def _boot(self, spec: WorkerSpec) -> None:
        try:
            info = await self._load(spec)
            await self._listen(spec, info)
            if not self._watches_itself:
                with self._phase("warm-up"):
                    self._report(Progress("warm-up"))
                    await self._probe(spec.socket, info)
        except LoadError as error:
            self._boot_failed(error.message, error.permanent)
        except Exception as error:
            log.exception("boot failed")
            self._boot_failed(f"{type(error).__name__}: {error}", permanent=False)
        else:
            self._control.send(Ready(info, self._timings_s))
            if not self._watches_itself:
                probing = self._probe_when_idle(spec.socket, info)
                self._probe_task = self._loop.create_task(probing)

    @property
    def _watches_itself(self) -> bool:
        """Its engine has had an answer when it is loaded, and looks after itself: each costs."""
        return isinstance(self._engine, TextEngine)

    async def _probe(self, socket_path: str, info: ModelInfo) -> None:
        self._probes += 1
        await warm_up(socket_path, info)

    async def _probe_when_idle(self, socket_path: str, info: ModelInfo) -> None:
        """Send a request of our own whenever nobody else's has completed for a while.

        Health stays true that way: an engine that would hang on the next request hangs on this
        one, and its growing progress age has the supervisor replace it before a client asks.
        """
        while True:
            before, runner = self._finished, self._runner
            await asyncio.sleep(PROBE_EVERY_S)
            if self._finished != before or (runner is not None and (runner.busy or runner.asleep)):
                continue
            try:
                await self._probe(socket_path, info)
            except (LoadError, OSError) as error:
                if runner is not None and not runner.draining and not runner.asleep:
                    self._broken(str(error))

    def _broken(self, error: str) -> None:
        log.error("the health probe failed", error=error)
        self._end(EXIT_ENGINE_DIED)

    def _emit(self, outputs: Sequence[StepOutput]) -> None:
        assert self._runner is not None
        for output in outputs:
            self._finished += output.finish is not None
            self._tokens += len(output.token_ids)
        if not self._of_use and self._served:
            self._of_use = True
            self._loop.call_soon_threadsafe(self._say_so)
        self._runner.emit(outputs)

    def _say_so(self) -> None:
        """It is of use from now on, and may be killed before anybody asks."""
        self._control.send(self._pong(0))

    async def _load(self, spec: WorkerSpec) -> ModelInfo:
        with self._phase("import"):
            self._report(Progress("import"))
            self._engine = engine = await asyncio.to_thread(create, spec)
        with self._phase("load"):
            return await asyncio.to_thread(engine.load, self._report_from_thread)

    async def _listen(self, spec: WorkerSpec, info: ModelInfo) -> None:
        assert self._engine is not None
        self._runner = Runner(self._engine, info, on_idle=lambda: self._end(0))
        self._adapters = Adapters(self._runner, self._control.send)
        probe = partial(self._probe, spec.socket, info)
        self._slumber = Slumber(self._runner, self._control.send, probe, self._broken)
        self._engine.start(self._emit)
        try:
            # Kept: the server lives as long as its reference.
            self._server = await listen(spec.socket, self._runner.connect)
        except OSError as error:
            message = f"cannot listen on {spec.socket}: {error.strerror}"
            raise LoadError(message, permanent=False) from error

    def _boot_failed(self, message: str, permanent: bool) -> None:
        self._control.send(BootFailed(message, permanent))
        self._end(EXIT_BOOT_FAILED)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._timings_s[name] = round(time.monotonic() - began, 3)

    def _report_from_thread(self, progress: Progress) -> None:
        self._loop.call_soon_threadsafe(self._report, progress)

    def _report(self, progress: Progress) -> None:
        """Pass progress on; every phase's first report, then at most ten a second."""
        self._progress_at = now = time.monotonic()
        phase, at = self._reported
        if phase != progress.phase or now - at >= REPORT_EVERY_S or progress.done == progress.total:
            self._reported = (progress.phase, now)
            self._control.send(Loading(progress))


async def warm_up(socket_path: str, info: ModelInfo, timeout_s: float = 600.0) -> None:
    """Bring one answer back along the path that requests take; raises LoadError if none comes."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_message(message: WorkerToGateway) -> None:
        if done.done():
            return
        if isinstance(message, Failed):
            text = f"the warm-up request failed: {message.message}"
            done.set_exception(LoadError(text, permanent=False))
        elif isinstance(message, Tokens) and any(delta.finish for delta in message.deltas):
            done.set_result(None)

    def on_close(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(LoadError(f"warm-up broke off: {error}", permanent=False))

    connection = await dial(socket_path, lambda: Connection(WorkerToGateway, on_message, on_close))
    connection.send(Hello(PROTOCOL, "probe", "warm-up"))
    connection.send(_probe_request(info))
    try:
        await asyncio.wait_for(done, timeout_s)
    except TimeoutError:
        raise LoadError(f"no warm-up token within {timeout_s:g} s", permanent=False) from None
    finally:
        connection.close()


def _probe_request(info: ModelInfo) -> Generate:
    """A token or two, or an embedding from a model that makes nothing else."""
    if "generate" in info.serves:
        return Generate(1, SamplingParams(max_tokens=2, temperature=0.0), prompt="Hello")
    return Generate(1, SamplingParams(), task="embed", inputs=["Hello"])
