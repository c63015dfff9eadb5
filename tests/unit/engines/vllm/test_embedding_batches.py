"""Texts on their way to the core; vLLM itself is not needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from servekit.engines.api.base import EmbedJob, StepOutput
from servekit.engines.api.job_validation import Limits
from servekit.engines.vllm.embedding_batches import BATCH, Texts
from servekit.engines.vllm.request_table import Embedding, RequestTable
from tests.unit.engines.vllm.recording import RecordingCore

COUNT = 3 * BATCH + 1


class Bench:
    """A core, what is held, and the sender between them."""

    def __init__(self) -> None:
        self.core = RecordingCore()
        self.held = RequestTable(lambda: None)
        self.failed: list[StepOutput] = []
        core: Any = self.core
        self.texts = Texts(core, self.held, Limits(100, 8), lambda name, job, at: name, self._fail)

    def _fail(self, output: StepOutput) -> None:
        self.held.emit_outputs([output], -1, self.failed.extend)

    def send(self, inputs: list[list[int]]) -> list[str]:
        names = [f"1#0.{at}" for at in range(len(inputs))]
        self.held.add_job(1, names, Embedding.from_names(names))
        self.texts.send(EmbedJob(1, inputs), names)
        return names


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.held.remove_all()
    made.texts.close()


def test_all_are_sent_in_their_order(bench: Bench) -> None:
    names = bench.send([[5]] * COUNT)
    bench.core.until(lambda: len(bench.core.added) == COUNT)
    bench.texts.close()
    assert bench.core.added == names and bench.core.aborted == [] and bench.failed == []


def test_who_sends_is_not_held_up(bench: Bench) -> None:
    go_on = threading.Event()

    def add() -> None:
        go_on.wait(30)

    bench.core.on_add = add
    bench.send([[5]] * COUNT)
    assert bench.core.added == []
    go_on.set()
    bench.core.until(lambda: len(bench.core.added) == COUNT)


def test_what_is_cancelled_is_sent_no_further_and_aborted_after_it(bench: Bench) -> None:
    began, go_on = threading.Event(), threading.Event()

    def add() -> None:
        began.set()
        go_on.wait(30)

    bench.core.on_add = add
    names = bench.send([[5]] * COUNT)
    assert began.wait(30)
    bench.held.cancel(1)
    go_on.set()
    bench.core.until(lambda: set(names) <= set(bench.core.aborted))
    assert len(bench.core.added) == BATCH and bench.failed == []


def test_half_a_job_is_taken_back_and_told(bench: Bench) -> None:
    def add() -> None:
        if len(bench.core.added) == BATCH:
            raise OverflowError("too large a number")

    bench.core.on_add = add
    names = bench.send([[5]] * COUNT)
    bench.core.until(lambda: set(names) <= set(bench.core.aborted))
    [output] = bench.failed
    said = "cannot be sent this request"
    assert output.error is not None and said in output.error and output.param is None
    assert len(bench.core.added) == BATCH and 1 not in bench.held


def test_a_job_that_a_dead_core_does_not_take_is_not_to_blame(bench: Bench) -> None:
    tried = threading.Event()

    def add() -> None:
        bench.core.dead = True
        tried.set()
        raise ConnectionError("it is dead")

    bench.core.on_add = add
    bench.send([[5]] * COUNT)
    assert tried.wait(30)
    bench.texts.close()
    assert bench.failed == [] and 1 in bench.held, "it goes on in another worker"


def test_a_text_that_is_wrong_is_the_jobs_own_fault(bench: Bench) -> None:
    bench.send([[5], [100]])
    bench.core.until(lambda: bool(bench.core.aborted))
    [output] = bench.failed
    assert output.error is not None and "100 is not in" in output.error
    assert output.param is not None and bench.core.added == []
