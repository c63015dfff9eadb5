"""The loop of an engine that runs step by step in a thread of its own.

Each turn carries out submitted and cancelled jobs, runs one step and emits its outputs together.
Only the loop's thread touches the runner.

If a step raises, the loop cannot be trusted any more: it sets `fatal`, which ends the worker, and
the running requests continue in other workers. No failure is emitted for them here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from servekit.engines.api.base import (
    TOLD_TO_FAIL,
    EmbedJob,
    Emit,
    Engine,
    Job,
    Load,
    SpeechJob,
    StepOutput,
)
from servekit.errors import EngineFailed, RequestError
from servekit.protocol.messages import WorkerSpec

#: How long `close` waits for the current step; the thread ends with its process anyway.
CLOSE_TIMEOUT_S = 5.0


class Request(Protocol):
    """A running job."""

    cancelled: bool

    @property
    def job(self) -> Job | EmbedJob | SpeechJob: ...
    @property
    def ended(self) -> StepOutput | None: ...


class StepRunner(Protocol):
    """The runner of requests, step by step; called by the loop's thread only."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_used(self) -> float: ...
    def add(self, row: Any) -> None: ...
    def cancel(self, row: Any) -> None: ...
    def step(self) -> Sequence[tuple[Any, StepOutput]]: ...
    def close(self) -> None: ...


class LoopedEngine(Engine):
    """An engine whose `load` sets `_runner`, and which passes its requests to `_take`."""

    _runner: StepRunner

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._rows: dict[int, Request] = {}
        self._serial = count()
        self._closing = self._fails = False
        self._thread: threading.Thread | None = None
        self._progress_at = time.monotonic()

    # ---------------------------------------------------------------- the caller's side

    def start(self, emit: Emit) -> None:
        self._emit = emit
        self._thread = threading.Thread(target=self._run_loop, name="engine", daemon=True)
        self._thread.start()

    def cancel(self, job_id: int) -> None:
        with self._changed:
            row = self._rows.pop(job_id, None)
            if row is not None:
                row.cancelled = True
                self._post(lambda: self._runner.cancel(row))

    def load_now(self) -> Load:
        runner, total = self._runner, len(self._rows)
        running = min(runner.running, total)
        age = time.monotonic() - self._progress_at if total else 0.0
        return Load(running, total - running, runner.kv_used if total else 0.0, age)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _key(self, job_id: int) -> str:
        """Return a key that is unique in the engine's life; job ids may be reused."""
        return f"{job_id}#{next(self._serial)}"

    def _take(self, row: Request) -> None:
        job_id = row.job.id
        with self._changed:
            if self.fatal is not None or self._closing:
                raise EngineFailed("The engine has stopped; the worker is being restarted.")
            if job_id in self._rows:
                raise RequestError(f"Request id {job_id} is already in flight.")
            if not self._rows:
                self._progress_at = time.monotonic()  # idle time is no lack of progress
            self._rows[job_id] = row
            self._post(lambda: self._add_row(row))

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._changed.notify()

    def fail_step(self) -> None:
        with self._changed:
            self._fails = True

    # ---------------------------------------------------------------- the engine's thread

    def _run_loop(self) -> None:
        try:
            while self._await_work():
                self._run_step()
        except BaseException as error:  # a panic in Rust is not an Exception
            self._die(error)
        else:
            self._runner.close()  # not after a failure: a broken device may never answer

    def _await_work(self) -> bool:
        """Execute commands until there is a step to run. Returns False when closing."""
        while True:
            with self._changed:
                idle = not (self._runner.running or self._runner.waiting)
                while idle and not self._commands and not self._closing:
                    self._changed.wait()
                commands, self._commands = self._commands, deque()
                if self._closing:
                    return False
            while commands:  # keep no command while waiting: it may hold an unloaded adapter
                commands.popleft()()
            if self._runner.running or self._runner.waiting:
                return True

    def _add_row(self, row: Request) -> None:
        if row.cancelled:
            return
        if (ended := row.ended) is None:
            self._runner.add(row)
        else:  # its previous worker died after the last token, before it reported the end
            self._emit_outputs([(row, ended)])

    def _run_step(self) -> None:
        if self._fails:
            raise RuntimeError(TOLD_TO_FAIL)
        outputs = self._runner.step()
        self._note_progress()
        self._emit_outputs(outputs)

    def _note_progress(self) -> None:
        """Show that the engine is alive; called also within steps that take long."""
        self._progress_at = time.monotonic()

    def _emit_outputs(self, outputs: Sequence[tuple[Request, StepOutput]]) -> None:
        """Emit the outputs of one step, without those of jobs cancelled meanwhile.

        Holds the lock, so that no output of a job is emitted after `cancel` has returned.
        """
        with self._changed:
            live = [output for row, output in outputs if not row.cancelled]
            for output in live:
                if output.finish is not None or output.error is not None:
                    self._end(self._rows.pop(output.id))
            if heard := [output for output in live if output.id >= 0]:
                self._emit(heard)

    def _end(self, row: Request) -> None:
        """Handle the end of a request. Internal ones, with ids below 0, are reported only here."""

    def _die(self, error: BaseException) -> None:
        with self._changed:
            self._rows = {}
            self._commands.clear()
            self.fatal = error
