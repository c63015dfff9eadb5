"""What each node of a cluster finds of itself, or why it could not be asked.

There is no Ray here: nodes, and what their tasks answer, are made up.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")
from ray.exceptions import TaskUnschedulableError

from servekit.protocol.control.ray_messages import Node, NodeRequirements
from servekit.ray.process import nodes as module
from servekit.ray.process.nodes import living_nodes, look_at

#: Ray checks the form of its ids.
ONE, TWO = "1" * 56, "2" * 56
WANT = NodeRequirements("m", "echo", "")


def entry(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": name,
        "NodeManagerAddress": f"host {name[:1]}",
        "Alive": alive,
        "Resources": resources,
    }


class Tasks:
    """Ray's way to run a function on a node: what was asked for, and what each node answers."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []
        self.answers: dict[str, list[Any]] = {}  # by node: encoded, an error, or None for silence

    def remote(self, function: object) -> Any:
        return self

    def task_of(self, **options: Any) -> Any:
        self.options.append(options)
        node = options["scheduling_strategy"].node_id

        async def run(wants: bytes) -> bytes:
            assert msgspec.msgpack.decode(wants, type=list[NodeRequirements]) == [WANT]
            answers = self.answers[node]
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if answer is None:
                await asyncio.Event().wait()
            if isinstance(answer, Exception):
                raise answer
            return msgspec.msgpack.encode(answer)

        return type("Task", (), {"remote": staticmethod(run)})


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    made = Tasks()
    function = type("Function", (), {"options": staticmethod(made.task_of)})
    monkeypatch.setattr("ray.remote", lambda what: function)
    monkeypatch.setattr("ray.nodes", lambda: [entry(ONE), entry(TWO)])
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    return made


async def test_only_nodes_that_live_count(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [entry(ONE), entry(TWO, alive=False)]
    monkeypatch.setattr("ray.nodes", lambda: known)
    assert await living_nodes() == {ONE: known[0]}


async def test_a_node_tells_of_itself_and_ray_of_its_address_and_size(tasks: Tasks) -> None:
    tasks.answers[ONE] = [Node(ONE, "?", 1, 1, "3.11.7", "2.60.0", "0.1.0", {"m": "no m"})]
    [found] = await look_at([entry(ONE, CPU=8.0, GPU=2.0)], (WANT,), 30.0)
    assert found == Node(ONE, "host 1", 8.0, 2.0, "3.11.7", "2.60.0", "0.1.0", {"m": "no m"})
    [options] = tasks.options
    assert (options["num_cpus"], options["max_retries"]) == (0, 0), "however busy it is"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "it has not answered within 0 s"),
        (ModuleNotFoundError("No module named 'servekit'"), "servekit is not installed there (No "),
        (ValueError("Traceback:\n  No module named 'servekit.ray'\n"), "servekit is not installed"),
        (ValueError("Traceback:\n  File a.py\n\n  the disk is full \n\n"), "the disk is full"),
        (ValueError(""), "ValueError"),
    ],
)
async def test_why_a_node_could_not_be_asked_is_told_with_its_size(
    tasks: Tasks, answer: Any, problem: str
) -> None:
    tasks.answers[ONE] = [answer]
    [found] = await look_at([entry(ONE, CPU=8.0)], (WANT,), 0.01 if answer is None else 30.0)
    assert (found.node, found.host, found.cpus, found.gpus) == (ONE, "host 1", 8.0, 0.0)
    assert found.problem.startswith(problem)
    if isinstance(answer, ValueError):
        assert found.problem in (problem, f"{problem} there")


async def test_a_new_node_is_given_a_moment(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    early = TaskUnschedulableError("not yet")
    tasks.answers[ONE] = [early, early, Node(ONE, "?", servekit="0.1.0")]
    [found] = await look_at([entry(ONE)], (WANT,), 30.0)
    assert (found.servekit, found.problem) == ("0.1.0", "")
    monkeypatch.setattr(module, "_KNOWN_S", 0.0)
    tasks.answers[ONE] = [early, Node(ONE, "?")]
    [found] = await look_at([entry(ONE)], (WANT,), 30.0)
    assert "not yet" in found.problem


async def test_a_node_that_is_lost_meanwhile_is_no_fault_of_the_cluster(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KNOWN_S", 0.0)
    tasks.answers[ONE] = [TaskUnschedulableError("the node doesn't exist any more")]
    tasks.answers[TWO] = [Node(TWO, "?", servekit="0.1.0")]
    both = [entry(ONE), entry(TWO)]
    first, second = await look_at(both, (WANT,), 30.0)
    assert "any more" in first.problem and not second.problem, "Ray still lists it"
    monkeypatch.setattr("ray.nodes", lambda: [entry(ONE, alive=False), entry(TWO)])
    assert await look_at(both, (WANT,), 30.0) == (second,)

    def fail() -> None:
        raise ConnectionError("the control plane restarts")

    monkeypatch.setattr("ray.nodes", fail)
    assert await look_at(both, (WANT,), 30.0) == (first, second)


async def test_one_node_that_is_silent_holds_up_no_other(tasks: Tasks) -> None:
    tasks.answers = {ONE: [None], TWO: [Node(TWO, "?", servekit="0.1.0")]}
    first, second = await look_at([entry(ONE), entry(TWO)], (WANT,), 0.05)
    assert first.problem and not second.problem
    assert await look_at([], (WANT,), 0.05) == ()
