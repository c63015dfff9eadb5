"""What is told of requests, and what is not once they are cancelled."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from servekit.engines.api.base import StepOutput
from servekit.engines.vllm.request_table import Embedding, RequestTable
from servekit.errors import RequestError, WorkerLost


class Told:
    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []

    def __call__(self, outputs: Sequence[StepOutput]) -> None:
        self.outputs += outputs

    @property
    def ids(self) -> list[int]:
        return [output.id for output in self.outputs]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def held() -> RequestTable:
    held = RequestTable(lambda: None)
    for job_id in (1, 2, 3):
        held.add_job(job_id, [f"{job_id}#0"])
    return held


def step(*ids: int) -> list[StepOutput]:
    return [StepOutput(job_id, [7]) for job_id in ids]


def test_a_step_is_told_as_it_came(held: RequestTable, told: Told) -> None:
    made = step(1, 2, 3)
    held.emit_outputs(made, held.left, told)
    assert told.outputs == made and len(held) == 3


def test_what_was_cancelled_since_the_step_was_made_is_left_out(
    held: RequestTable, told: Told
) -> None:
    since, made = held.left, step(1, 2, 3)
    assert held.cancel(2) == ["2#0"]
    held.emit_outputs(made, since, told)
    assert told.ids == [1, 3]
    held.emit_outputs(step(2), since, told)
    assert told.ids == [1, 3]


def test_a_cancellation_waits_for_the_step_that_is_being_told(held: RequestTable) -> None:
    telling, go_on, cancelled = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def emit(outputs: Sequence[StepOutput]) -> None:
        telling.set()
        go_on.wait(30)
        order.append("told")

    def cancel() -> None:
        held.cancel(1)
        order.append("cancelled")
        cancelled.set()

    teller = threading.Thread(target=held.emit_outputs, args=(step(1), held.left, emit))
    teller.start()
    assert telling.wait(30)
    threading.Thread(target=cancel).start()
    assert not cancelled.wait(0.05)
    held.add_job(4, ["4#0"])  # who begins does not wait
    go_on.set()
    assert cancelled.wait(30)
    teller.join()
    assert order == ["told", "cancelled"]


def test_under_fire_nothing_comes_after_a_cancellation() -> None:
    held, over, told = RequestTable(lambda: None), threading.Event(), threading.Event()
    gone: set[int] = set()
    late: list[int] = []

    def emit(outputs: Sequence[StepOutput]) -> None:
        late.extend(output.id for output in outputs if output.id in gone)
        told.set()

    def loop() -> None:
        while not over.is_set():
            since = held.left
            held.emit_outputs(step(*list(held.jobs.values())), since, emit)

    thread = threading.Thread(target=loop)
    thread.start()
    for job_id in range(3000):
        held.add_job(job_id, [f"{job_id}#0"])
        if job_id >= 4:
            held.cancel(job_id - 4)
            gone.add(job_id - 4)
        if job_id % 10 == 0:  # or the other thread might get no turn
            told.clear()
            assert told.wait(30)
    over.set()
    thread.join()
    assert late == []


def test_who_is_told_may_cancel(held: RequestTable) -> None:
    def emit(outputs: Sequence[StepOutput]) -> None:
        held.cancel(outputs[0].id)

    held.emit_outputs(step(1), held.left, emit)
    assert 1 not in held


def test_what_has_ended_is_forgotten(held: RequestTable, told: Told) -> None:
    held.emit_outputs([StepOutput(1, [7], "stop"), StepOutput(2, [], error="no")], held.left, told)
    assert told.ids == [1, 2] and len(held) == 1 and list(held.jobs) == ["3#0"]
    assert held.cancel(1) == []


def test_a_job_with_texts_goes_as_a_whole(held: RequestTable) -> None:
    names = ["4#1.0", "4#1.1"]
    held.add_job(4, names, Embedding.from_names(names))
    assert held.jobs["4#1.1"] == 4 and held.embeddings[4].left == 2
    assert held.cancel(4) == names
    assert 4 not in held.embeddings and "4#1.0" not in held.jobs


def test_an_id_is_held_once(held: RequestTable) -> None:
    with pytest.raises(RequestError, match="already in flight"):
        held.add_job(1, ["1#9"])


def test_after_its_end_nobody_is_told_and_nobody_is_taken(held: RequestTable, told: Told) -> None:
    since, made = held.left, step(1, 2, 3)
    held.remove_all()
    held.emit_outputs(made, since, told)
    assert told.outputs == [] and len(held) == 0
    with pytest.raises(WorkerLost):
        held.add_job(5, ["5#0"])


def test_who_comes_first_is_noticed() -> None:
    firsts: list[None] = []
    held = RequestTable(lambda: firsts.append(None))
    for job_id in (1, 2):
        held.add_job(job_id, [f"{job_id}#0"])
    assert len(firsts) == 1
