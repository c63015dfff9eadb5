"""Stands in for vLLM's engine core, which needs a GPU: it notes what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class RecordingCore:
    """Of `core.Core` what others use of it. `answer` is asked for what `call` returns."""

    def __init__(self, answer: Callable[..., Any] = lambda *told: None) -> None:
        self.dead = False
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.on_add: Callable[[], None] = lambda: None
        self.changed = threading.Condition()
        self._answer = answer

    def add(self, made: Sequence[Any]) -> None:
        self.on_add()
        with self.changed:
            self.added += made
            self.changed.notify_all()

    def abort_jobs(self, names: list[str]) -> None:
        with self.changed:
            self.aborted += names
            self.changed.notify_all()

    def call(self, *told: Any) -> Any:
        self.calls.append(told)
        return self._answer(*told)

    def until(self, happened: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(happened, 30.0), "waited in vain"
