"""The life cycle of a worker: load the engine, listen, warm up, send Ready, serve, drain.

starting ── Load ──▶ loading ── warm-up token returned ──▶ ready ── Drain ──▶ draining ──▶ 0
    └── error ──▶ BootFailed, exit 3         │ ▲ └── engine died ──▶ exit 70
                                       Sleep ▼ │ Wake, and a token
                                            asleep

A load that shares its GPUs with other workers imports the engine, and waits there for Proceed.

When the control connection ends, the process group is killed. A worker on another machine than its
supervisor does so only if no supervisor has reconnected for a while: see `worker.remote`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from msgspec.structs import replace

from servekit.engines import create_engine, fetch_ahead
from servekit.engines.api.base import Engine
from servekit.engines.api.load_phases import heard_by, phase
from servekit.engines.api.text_engine import TextEngine
from servekit.errors import LoadError, Unsupported, describe_error
from servekit.protocol.adapters import LoadAdapter, UnloadAdapter
from servekit.protocol.control.startup_messages import GATE, GatewayConnected, Phase, PhaseReport
from servekit.protocol.messages import (
    PROTOCOL,
    BootFailed,
    ChatMessage,
    DeltaBatch,
    Drain,
    EngineDied,
    Failed,
    Generate,
    Hello,
    HttpRequest,
    Load,
    Loading,
    ModelInfo,
    Ping,
    Pong,
    Proceed,
    Progress,
    Ready,
    SamplingParams,
    SpeechParams,
    Stop,
    TokenBatch,
    ToWorker,
    WorkerSpec,
    WorkerToGateway,
)
from servekit.protocol.residency import Sleep, Wake
from servekit.protocol.tool_formats import FRAMED
from servekit.protocol.transport.connection import Connection, Factory
from servekit.system.parent_death import CHAOS, FAIL_STEP, end_group
from servekit.worker.adapters import Adapters
from servekit.worker.engine_threads import start_engine
from servekit.worker.runner import Runner
from servekit.worker.sleep import SleepControl
from servekit.worker.transport import Channel

log: Any = structlog.get_logger("servekit.worker")

EXIT_BOOT_FAILED = 3
EXIT_ENGINE_DIED = os.EX_SOFTWARE
#: Minimum interval between progress reports.
REPORT_EVERY_S = 0.1
#: Longest wait for the report of a file to be on its way.
_TOLD_WITHIN_S = 1.0
#: A worker that has completed nothing for this long sends itself a request.
PROBE_EVERY_S = 15.0
#: The share of the time that a token of these requests may take, since a slow model would keep the
#: machine from its rest; and the longest interval of them. The encoder of a speech model reads 30 s
#: of silence each time.
PROBE_SHARE, PROBE_AT_LEAST_EVERY_S = 1 / 4000, 300.0
#: The most tokens of such a request: one of the prompt's step, one of a decode step. At rest one is
#: enough, but for each `PROBE_DECODES_EVERY`th request.
PROBE_TOKENS, PROBE_DECODES_EVERY = 2, 4
#: This many tokens count as a completed request in the restart policy: a few decode steps have
#: succeeded, and a client has their output.
TOKENS_OF_USE = 8


def run_worker(name: str, channel: Channel, began_s: float) -> int:
    """Run a worker until it is told to stop; return the exit code.

    `began_s` is the monotonic time at which this process became a worker.
    """
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # an environment of the engine's own may lack it
        from uvloop import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        code, stuck = runner.run(_run_on_loop(name, channel, began_s))
        if stuck:  # still loading, or hanging in a broken device: do not wait for the thread
            sys.stderr.flush()
            os._exit(code)
        return code


async def _run_on_loop(name: str, channel: Channel, began_s: float) -> tuple[int, bool]:
    """Return the exit code, and whether a thread that cannot be stopped may be left."""
    worker = Worker(name, channel, began_s)
    code = await worker.run()
    return code, worker.is_loading or code == EXIT_ENGINE_DIED


class Worker:
    """A worker process. All state is written on the event loop."""

    def __init__(self, name: str, channel: Channel, began_s: float) -> None:
        self.name = name
        self._began_s = began_s
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._channel = channel
        self._boot_task: asyncio.Task[None] | None = None
        self._probe_task: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._runner: Runner | None = None
        self._adapters: Adapters | None = None
        self._slumber: SleepControl | None = None
        self._timings_s: dict[str, float] = {}
        self._reported = ("", 0.0)  # phase and time of the last progress report
        self._progress_at = time.monotonic()
        self._admitted = asyncio.Event()  # it may use its GPUs
        self._waits = False  # for that
        self._dying: asyncio.Task[None] | None = None  # set once the engine has died
        self._finished = 0  # requests the engine has completed, probes included
        self._tokens = 0
        self._probes = self._probe_tokens = 0
        self._probe_s = math.inf  # the time that a token of the fastest one took
        self._of_use = False  # reported to the supervisor without a ping

    async def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._set_exit, 0)
        if os.environ.get(CHAOS) == "1":
            self._loop.add_signal_handler(FAIL_STEP, self._fail_step)
        await self._channel.open(self._on_message, self._on_eof)
        heard_by(self._hear_from_any_thread)
        self._channel.send(PhaseReport(Phase("worker", self._began_s, time.monotonic())))
        code = await self._exit
        if self._engine is not None and code not in (EXIT_BOOT_FAILED, EXIT_ENGINE_DIED):
            self._engine.close()
        await self._channel.close()
        return code

    @property
    def is_loading(self) -> bool:
        """Return whether a thread is loading the engine; it outlives the event loop."""
        return self._boot_task is not None and self._runner is None and not self._boot_task.done()

    def _set_exit(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    # ---- from the supervisor

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case Load(spec, waits):
                if not waits:
                    self._admitted.set()
                self._boot_task = self._loop.create_task(self._boot_engine(spec))
            case Proceed():
                self._admitted.set()
            case Ping(seq):
                self._channel.send(self._make_pong(seq))
            case Drain():
                self._start_draining()
            case Stop():
                self._set_exit(0)
            case LoadAdapter() | UnloadAdapter():
                assert self._adapters is not None  # sent only after Ready
                self._adapters.handle_order(message)
            case Sleep() | Wake():
                assert self._slumber is not None  # sent only after Ready
                self._slumber.handle_order(message)

    def _on_eof(self, error: Exception | None) -> None:
        if not self._exit.done():
            log.error("supervisor_lost", error=str(error or "EOF"))
            end_group()

    def _make_pong(self, seq: int) -> Pong:
        if self._runner is None or self._engine is None:
            age_s = 0.0 if self._waits else time.monotonic() - self._progress_at
            return Pong(seq, age_s, 0, 0, 0.0)
        if self._engine.fatal is not None:
            self._on_death()
        now = self._engine.load_now()
        running, waiting = now.running, now.waiting
        trouble = self._engine.trouble if isinstance(self._engine, TextEngine) else ""
        age_s, kv_used, finished = now.progress_age_s, now.kv_used, self._completed
        drafts = now.draft_tokens, now.accepted_tokens
        return Pong(seq, age_s, running, waiting, kv_used, self._served, trouble, finished, *drafts)

    @property
    def _completed(self) -> int:
        return max(self._finished - self._probes, 0)

    @property
    def _served(self) -> int:
        # Tokens of an unfinished long answer count, so that a life cut short was still useful.
        tokens = max(self._tokens - self._probe_tokens, 0)
        return max(self._completed, tokens // TOKENS_OF_USE)

    def _start_draining(self) -> None:
        if self._runner is None:
            self._set_exit(0)
        else:
            self._runner.start_draining()

    def _fail_step(self) -> None:
        """Make the engine's next step fail, for chaos tests."""
        if self._runner is not None and self._engine is not None:
            try:
                self._engine.fail_step()
            except Unsupported as error:
                log.warning("fault_injection_unsupported", reason=error.message)

    # ---- the engine's death

    def _hear_death_from_any_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and so does the process
            self._loop.call_soon_threadsafe(self._on_death)

    def _on_death(self) -> None:
        assert self._engine is not None and self._engine.fatal is not None
        error = self._engine.fatal
        raised = error if error.__traceback__ is not None else None
        self._report_death(describe_error(error), raised)

    def _on_broken(self, error: str) -> None:
        self._report_death(f"the health probe failed: {error}")

    def _report_death(self, cause: str, error: BaseException | None = None) -> None:
        """Report the engine's death to the supervisor, disconnect the gateways and exit."""
        if self._dying is None and not self._exit.done():
            log.error("engine_died", cause=cause, exc_info=error)
            self._channel.send(EngineDied(cause))
            self._dying = self._loop.create_task(self._lose_gateways())

    async def _lose_gateways(self) -> None:
        self._channel.stop_serving()
        try:
            if self._runner is not None:
                await self._runner.disconnect_all()
        finally:
            self._set_exit(EXIT_ENGINE_DIED)

    # ---- boot

    async def _boot_engine(self, spec: WorkerSpec) -> None:
        try:
            info = await self._load_engine(spec)
            await self._start_serving(spec, info)
            if not self._watches_itself:
                with phase("warm-up"):
                    self._report_progress(Progress("warm-up"))
                    await self._send_probe(info)
        except LoadError as error:
            self._boot_failed(error.message, error.permanent)
        except Exception as error:
            log.exception("boot_failed")
            self._boot_failed(f"{type(error).__name__}: {error}", permanent=False)
        else:
            self._channel.send(Ready(info, self._timings_s))
            if not self._watches_itself:
                probing = self._probe_when_idle(info)
                self._probe_task = self._loop.create_task(probing)

    @property
    def _watches_itself(self) -> bool:
        """Return whether the engine checks itself, so that the worker sends no probes."""
        return isinstance(self._engine, TextEngine) and not self._engine.probed

    async def _send_probe(self, info: ModelInfo, most: int = PROBE_TOKENS) -> None:
        self._probes += 1
        self._probe_tokens += most  # or fewer, which is known at the end
        began_s = time.monotonic()
        tokens = await warm_up(self._channel.dial, info, most)
        self._probe_tokens -= most - tokens
        took_s = time.monotonic() - began_s
        self._probe_s = min(self._probe_s, took_s / (tokens or PROBE_TOKENS))

    async def _probe_when_idle(self, info: ModelInfo) -> None:
        """Send a probe request whenever no other request has completed for a while.

        The probe keeps the health status true: an engine that would hang on the next request hangs
        on the probe, and its growing progress age makes the supervisor replace the worker before a
        client is affected.
        """
        while True:
            before, runner = self._finished, self._runner
            seldom_s = min(self._probe_s / PROBE_SHARE, PROBE_AT_LEAST_EVERY_S)
            await asyncio.sleep(max(PROBE_EVERY_S, seldom_s))
            if self._finished != before or (runner is not None and (runner.busy or runner.asleep)):
                continue
            try:
                decodes = self._probes % PROBE_DECODES_EVERY == 0
                await self._send_probe(info, PROBE_TOKENS if decodes else 1)
            except (LoadError, OSError) as error:
                if runner is not None and not runner.draining and not runner.asleep:
                    self._on_broken(str(error))

    def _on_step(self, tokens: int, ends: int) -> None:
        self._tokens += tokens
        self._finished += ends
        if not self._of_use and self._served:
            self._of_use = True  # unasked, as the worker may be killed before the next ping
            self._channel.send(self._make_pong(0))

    async def _load_engine(self, spec: WorkerSpec) -> ModelInfo:
        with phase("import"):
            self._report_progress(Progress("import"))
            self._engine = engine = await asyncio.to_thread(self._create_engine, spec)
            engine.on_death = self._hear_death_from_any_thread
        if not self._admitted.is_set():
            await self._await_admission()
        with phase("load"):
            return await asyncio.to_thread(self._load_in_thread, engine)

    async def _await_admission(self) -> None:
        """Wait for the GPUs' turn and memory; the time limit of the load does not run."""
        with phase(GATE):
            self._report_progress(Progress(GATE))
            self._waits = True
            await self._admitted.wait()
            self._waits, self._progress_at = False, time.monotonic()

    def _load_in_thread(self, engine: Engine) -> ModelInfo:
        info = engine.load(self._report_from_thread)
        files = engine.identify(portable=self._channel.is_remote)
        info = replace(info, generation=f"{engine.spec.edition}.{files}")
        measure = getattr(getattr(engine, "codec", None), "token_bytes", None)
        return info if measure is None else replace(info, token_bytes=measure())

    def _create_engine(self, spec: WorkerSpec) -> Engine:
        fetch_ahead(spec, self._report_from_thread)
        return create_engine(spec)

    async def _start_serving(self, spec: WorkerSpec, info: ModelInfo) -> None:
        assert self._engine is not None
        runner = Runner(self._engine, info, on_idle=lambda: self._set_exit(0))
        runner.portable = self._channel.is_remote
        await asyncio.to_thread(runner.identify_adapters, spec.adapters)
        runner.on_greeting, runner.on_step = self._on_greeting, self._on_step
        self._adapters = Adapters(runner, self._channel.send)
        self._slumber = SleepControl(
            runner, self._channel.send, lambda: self._send_probe(info), self._on_broken
        )
        start_engine(self._engine, runner.emit)
        self._runner = runner  # not before: a ping would ask an engine that has not started
        try:
            await self._channel.serve(spec, runner)
        except OSError as error:
            message = f"cannot listen on {spec.socket}: {error.strerror}"
            raise LoadError(message, permanent=False) from error

    def _boot_failed(self, message: str, permanent: bool) -> None:
        if self._dying is not None:
            return  # the engine's death was reported as the cause
        self._channel.send(BootFailed(message, permanent))
        self._set_exit(EXIT_BOOT_FAILED)

    def _hear_from_any_thread(self, of: Phase) -> None:
        if threading.get_ident() == self._thread:
            self._report_phase(of)
            return
        told = threading.Event()

        def report() -> None:
            self._report_phase(of)
            told.set()

        self._loop.call_soon_threadsafe(report)
        if of.file and of.ended_s is None:  # the process may end before its loop has a turn
            told.wait(_TOLD_WITHIN_S)

    def _report_phase(self, of: Phase) -> None:
        """Report a phase at once, so that the supervisor knows the stage if the worker dies."""
        if of.ended_s is not None and not of.within:
            self._timings_s[of.name] = round(of.ended_s - of.began_s, 3)
        self._channel.send(PhaseReport(of))

    def _on_greeting(self, gateway: str) -> None:
        self._channel.send(GatewayConnected(gateway, time.monotonic()))

    def _report_from_thread(self, progress: Progress) -> None:
        self._loop.call_soon_threadsafe(self._report_progress, progress)

    def _report_progress(self, progress: Progress) -> None:
        """Send progress: the first report of each phase, then at most ten per second."""
        self._progress_at = now = time.monotonic()
        phase, at = self._reported
        if phase != progress.phase or now - at >= REPORT_EVERY_S or progress.done == progress.total:
            self._reported = (progress.phase, now)
            self._channel.send(Loading(progress))


# ---------------------------------------------------------------- the probe


async def warm_up(
    dial: Callable[[Factory], Awaitable[Connection[Any]]],
    info: ModelInfo,
    most: int = PROBE_TOKENS,
    timeout_s: float = 600.0,
) -> int:
    """Complete one request along the path of ordinary requests; return the tokens of its answer.

    These are `most`, or fewer. Raises LoadError on failure.
    """
    tokens = 0
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_message(message: WorkerToGateway) -> None:
        nonlocal tokens
        if done.done():
            return
        match message:
            case DeltaBatch(deltas):
                tokens += sum(len(delta.token_ids) for delta in deltas)
            case TokenBatch(ids):
                tokens += len(ids)
        if isinstance(message, Failed):
            text = f"the warm-up request failed: {message.message}"
            done.set_exception(LoadError(text, permanent=False))
        elif isinstance(message, DeltaBatch) and any(delta.finish for delta in message.deltas):
            done.set_result(None)

    def on_close(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(
                LoadError(
                    f"the connection of the warm-up request was lost: {error}", permanent=False
                )
            )

    connection = await dial(lambda: Connection(WorkerToGateway, on_message, on_close))
    connection.send(Hello(PROTOCOL, "probe", "warm-up"))
    connection.send(_probe_request(info, most))
    try:
        await asyncio.wait_for(done, timeout_s)
    except TimeoutError:
        raise LoadError(f"no warm-up token within {timeout_s:g} s", permanent=False) from None
    finally:
        connection.close()
    return tokens


#: A tenth of a second, as WAV: one channel of 16 bits at 16 kHz.
_SILENCE = struct.pack(
    "<4sI8sIHHIIHH4sI3200x", b"RIFF", 3236,
    b"WAVEfmt ", 16, 1, 1, 16_000, 32_000, 2, 16, b"data", 3200,
)  # fmt: skip


def _probe_request(info: ModelInfo, most: int) -> Generate:
    """Return a request for `most` tokens, to pool a text, or for the health page of a server.

    A server's model is always asked for two tokens, and a speech model, which hears silence, too.
    """
    two = SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.0)
    if "generate" in info.serves and info.dialect.tools == FRAMED and info.chat:
        # not every server has plain completions
        return Generate(1, two, messages=[ChatMessage("user", "Hello")])
    if "generate" in info.serves:
        return Generate(1, SamplingParams(max_tokens=most, temperature=0.0), prompt="Hello")
    if "embed" in info.serves:
        return Generate(1, SamplingParams(), task="embed", inputs=["Hello"])
    if "classify" in info.serves:
        return Generate(1, SamplingParams(), task="classify", inputs=["Hello"])
    if "score" in info.serves:
        return Generate(1, SamplingParams(), task="score", inputs=["Hello"], queries=["Hello"])
    if "transcribe" in info.serves:
        params, speech = SamplingParams(max_tokens=PROBE_TOKENS), SpeechParams(len(_SILENCE))
        return Generate(1, params, task="transcribe", body=_SILENCE, speech=speech)
    return Generate(1, SamplingParams(), task="forward", http=HttpRequest(path=""))
