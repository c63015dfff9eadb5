"""The engine's sleep state and its transitions, in the engine's thread.

    awake ── cache dropped, weights offloaded ──▶ asleep
      ▲                                             │
      └──── weights restored, cache created ────────┘

A failed transition is undone on all ranks before the error is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

import torch

from servekit.engines.transformers.runner import Runner
from servekit.engines.transformers.sleep.weight_offload import WeightStore
from servekit.engines.transformers.tensor_parallel.controller import Ranks
from servekit.errors import LoadError

_NO_ROOM = (MemoryError, torch.OutOfMemoryError, LoadError)


class SleepState:
    """The sleep state of one engine."""

    def __init__(self, runner: Runner, store: WeightStore, ranks: Ranks | None) -> None:
        self._runner = runner
        self._store = store
        self._ranks = ranks
        self.asleep = False

    def sleep(self) -> None:
        """Put the model to sleep, as `Engine.sleep`."""
        if self.asleep:
            return
        if self._runner.running or self._runner.waiting:
            raise LoadError("Requests are under way; the model stays awake.", permanent=False)
        self._runner.drop_pages()
        try:
            self._lie_down()
        except _NO_ROOM as error:
            self._runner.make_pages()
            raise _as_load_error(error) from error
        self.asleep = True
        gc.collect()
        _trim_heap()

    def wake(self) -> None:
        """Wake the model, as `Engine.wake`."""
        if not self.asleep:
            return
        try:
            with self._ranks.waking() if self._ranks else contextlib.nullcontext():
                self._store.wake()
        except _NO_ROOM as error:
            raise _as_load_error(error) from error
        try:
            self._runner.make_pages()
        except _NO_ROOM as error:
            self._lie_down()
            raise _as_load_error(error) from error
        self.asleep = False

    def _lie_down(self) -> None:
        with self._ranks.falling_asleep() if self._ranks else contextlib.nullcontext():
            self._store.sleep()


def _as_load_error(error: Exception) -> LoadError:
    if isinstance(error, LoadError):
        return error
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return LoadError(f"There is no room for the model: {first}", permanent=False)


def _trim_heap() -> None:
    """Make the C library return freed memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
