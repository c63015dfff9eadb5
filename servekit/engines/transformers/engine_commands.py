"""Commands that run in the engine's thread between two steps.

Only the engine's thread may use the runner. Another thread posts a command there and waits; before
the engine is started, its loading thread takes the role of the engine's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from servekit.engines.transformers.request_row import Row
from servekit.engines.transformers.runner_factory import CausalRunner
from servekit.errors import EngineFailed

#: How often a waiting thread checks that the engine is still running.
_LOOK_S = 0.2


class Loop(Protocol):
    """The part of the engine that `EngineCommands` uses."""

    @property
    def started(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    def post(self, command: Callable[[], None]) -> None: ...
    def take_first(self, row: Row) -> None: ...


class EngineCommands:
    """Runner of commands in the engine's thread.

    Both methods raise EngineFailed if the engine ends.
    """

    def __init__(self, loop: Loop, runner: CausalRunner) -> None:
        self._loop = loop
        self._runner = runner

    def between_steps(self, work: Callable[[], None]) -> None:
        """Run `work` and return when it is done; its exception is raised here."""
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
        """Run rows to completion in the engine's batches, without emitting their output."""
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
