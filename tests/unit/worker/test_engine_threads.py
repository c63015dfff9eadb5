"""An error that escapes a thread of an engine is the engine's death, and nobody else's."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from servekit.worker.engine_threads import start_engine


class Engine:
    """An engine whose threads end as a test says."""

    def __init__(self) -> None:
        self.fatal: BaseException | None = None
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = [ValueError("first")]

    def start(self, emit: Any) -> None:
        for error in self.errors:
            self.threads.append(run_later(self.go.wait, error))

    def end(self) -> None:
        self.go.set()
        for thread in self.threads:
            thread.join()


def run_later(wait: Callable[[], object], error: BaseException) -> threading.Thread:
    def run() -> None:
        wait()
        raise error

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.fixture
def others() -> Iterator[list[Any]]:
    """The errors that are reported as before."""
    told: list[Any] = []
    before = threading.excepthook
    threading.excepthook = lambda uncaught: told.append(uncaught.exc_value)
    yield told
    threading.excepthook = before


def start(engine: Any) -> None:
    start_engine(engine, lambda outputs: None)


def test_an_error_of_its_thread_is_fatal(others: list[Any]) -> None:
    engine = Engine()
    start(engine)
    assert engine.fatal is None
    engine.end()
    assert engine.fatal is engine.errors[0] and others == []


def test_a_thread_that_dies_at_once_is_its_own_too(others: list[Any]) -> None:
    engine = Engine()
    engine.go.set()

    def start_and_wait(emit: Any) -> None:
        Engine.start(engine, emit)
        engine.threads[0].join()

    engine.start = start_and_wait  # type: ignore[method-assign]
    start(engine)
    assert engine.fatal is engine.errors[0] and others == []


def test_the_first_error_stays(others: list[Any]) -> None:
    engine = Engine()
    engine.errors = []
    start(engine)
    engine.fatal = told = RuntimeError("as it said itself")
    engine.errors = [ValueError("later")]
    engine.start(None)
    engine.end()
    assert engine.fatal is told


def test_threads_of_others_are_reported_as_before(others: list[Any]) -> None:
    go, theirs = threading.Event(), KeyError("theirs")
    before = run_later(go.wait, theirs)
    engine = Engine()
    start(engine)
    late = LookupError("of a thread that came later")
    later = run_later(go.wait, late)
    go.set()
    before.join()
    later.join()
    assert engine.fatal is None
    assert sorted(map(repr, others)) == sorted(map(repr, [theirs, late]))
    engine.end()


def test_an_engine_that_is_gone_is_not_kept_for_it(others: list[Any]) -> None:
    engine = Engine()
    error, go, threads = engine.errors[0], engine.go, engine.threads
    engine.start = lambda emit: threads.append(run_later(go.wait, error))  # type: ignore[method-assign]
    start(engine)
    del engine
    gc.collect()
    go.set()
    threads[0].join()
    assert others == [error]
