"""Reaching into a running engine from another thread, between two of its steps.

Nothing but the engine's thread touches the runner. Who wants something of it leaves a command
there, and waits; while the engine has not been started, its loading thread is that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner_factory import CausalRunner
from servekit.errors import EngineFailed

#: How often who waits looks whether the engine is still there.
_LOOK_S = 0.2


class Loop(Protocol):
    """What is needed of the engine."""

    @property
    def started(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    def post(self, command: Callable[[], None]) -> None: ...
    def take_first(self, row: Row) -> None: ...


class EngineCommands:
    """See the module's docstring. Both methods raise EngineFailed if the engine ends meanwhile."""

    def __init__(self, loop: Loop, runner: CausalRunner) -> None:
        self._loop = loop
        self._runner = runner

    def between_steps(self, work: Callable[[], None]) -> None:
        """Have `work` done, and return when it is; what it raises is raised here."""
        if not self._loop.started:
            work()
            return
        done, failure = threading.Event(), list[BaseException]()

        def command() -> None:
            try:
                work()
            except BaseException as error:
                failure.append(error)
            done.set()

        self._loop.post(command)
        self._wait(done)
        if failure:
            raise failure[0]

    def run_rows(self, rows: list[Row]) -> None:
        """Run rows to their end in the engine's own batches; nothing of them is emitted."""
        if not self._loop.started:
            for row in rows:
                self._runner.add(row)
            while self._runner.running or self._runner.waiting:
                self._runner.step()
            return
        for row in rows:
            row.private = threading.Event()
            self._loop.take_first(row)
        for row in rows:
            if row.private is not None:
                self._wait(row.private)

    def _wait(self, event: threading.Event) -> None:
        while not event.wait(_LOOK_S):
            if self._loop.ended:
                raise EngineFailed("The engine has stopped; the worker is being restarted.")
