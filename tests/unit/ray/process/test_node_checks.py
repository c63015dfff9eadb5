"""Each node is checked once for a model before the model is placed there, and again if it failed.

There is no Ray here: the nodes and their answers are made up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

pytest.importorskip("ray")

from servekit.protocol.control.ray_messages import Node, NodeRequirements, PlaceWorker
from servekit.ray.node_inventory import own_versions
from servekit.ray.process import nodes
from servekit.ray.process.node_checks import AGAIN_S, LOOK_S, NodeChecks
from tests.passing_time import Clock, passing_time

OWN = own_versions()
WANT = NodeRequirements("m", "echo", "/models/m")
ORDER = PlaceWorker(1, "m/0", "m", 1, 2.0, "PACK", "print", want=WANT)


def found(name: str, **facts: Any) -> Node:
    return replace(Node(name, name, 4, 2, OWN.python, OWN.ray, OWN.servekit), **facts)


class Nodes:
    """The living nodes by their size, and what each finds."""

    def __init__(self) -> None:
        self.sizes: dict[str, dict[str, float]] = {}
        self.answers: dict[str, Node] = {}
        self.looks: list[list[str]] = []

    def have(self, name: str, cpus: float = 4, gpus: float = 2, **facts: Any) -> None:
        self.sizes[name] = {"CPU": cpus, "GPU": gpus}
        self.answers[name] = found(name, **facts)

    async def living(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"NodeID": name, "Alive": True, "Resources": size}
            for name, size in self.sizes.items()
        }

    async def look(
        self, asked: Iterable[dict[str, Any]], wants: tuple[NodeRequirements, ...], within_s: float
    ) -> tuple[Node, ...]:
        assert (wants, within_s) == ((WANT,), LOOK_S)
        names = [node["NodeID"] for node in asked]
        self.looks.append(names)
        return tuple(self.answers[name] for name in names)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    made = Nodes()
    monkeypatch.setattr(nodes, "living_nodes", made.living)
    monkeypatch.setattr(nodes, "look_at", made.look)
    return made


@pytest.fixture
async def clock() -> AsyncIterator[Clock]:
    with passing_time() as clock:
        yield clock


async def test_a_node_that_passed_is_not_asked_again(there: Nodes, clock: Clock) -> None:
    there.have("good")
    checks = NodeChecks()
    assert await checks.faults(ORDER) == {}
    clock.now_s += 10 * AGAIN_S
    assert await checks.faults(ORDER) == {}
    assert there.looks == [["good"], []]


async def test_a_node_that_failed_is_asked_again_after_a_while(there: Nodes, clock: Clock) -> None:
    there.have("old", servekit="0.0.1")
    checks = NodeChecks()
    first = await checks.faults(ORDER)
    assert list(first) == ["old"] and "has servekit 0.0.1" in first["old"]
    clock.now_s += AGAIN_S - 1
    assert await checks.faults(ORDER) == first
    assert there.looks == [["old"], []]
    there.have("old")
    clock.now_s += 1
    assert await checks.faults(ORDER) == {}


async def test_only_nodes_that_are_large_enough_are_asked(there: Nodes) -> None:
    there.have("small", cpus=1, servekit="0.0.1")
    there.have("without", gpus=0, servekit="0.0.1")
    there.have("good")
    assert await NodeChecks().faults(ORDER) == {}
    assert there.looks == [["good"]]


async def test_one_node_may_be_asked_for_alone(there: Nodes) -> None:
    there.have("good")
    there.have("old", servekit="0.0.1")
    checks = NodeChecks()
    assert list(await checks.faults(ORDER, "old")) == ["old"]
    assert there.looks == [["old"]]
    assert list(await checks.faults(ORDER, "gone")) == ["old"], "a node that is gone: all are asked"


async def test_what_was_found_before_is_not_asked_for(there: Nodes) -> None:
    there.have("good")
    there.have("poor")
    checks = NodeChecks()
    checks.record([there.answers["good"], found("poor", lacks={"m": "there is no m"})], [WANT])
    faults = await checks.faults(ORDER)
    assert list(faults) == ["poor"] and faults["poor"].endswith("there is no m")
    assert there.looks == [[]]


async def test_each_model_is_asked_for_by_itself(there: Nodes) -> None:
    there.have("good")
    checks = NodeChecks()
    checks.record([there.answers["good"]], [NodeRequirements("other", "echo", "")])
    await checks.faults(ORDER)
    assert there.looks == [["good"]]


async def test_a_node_that_comes_back_is_a_new_one(there: Nodes) -> None:
    there.have("old", servekit="0.0.1")
    checks = NodeChecks()
    await checks.faults(ORDER)
    there.sizes.clear()
    assert await checks.faults(ORDER) == {}
    there.have("old")
    assert await checks.faults(ORDER) == {}
    assert there.looks == [["old"], [], ["old"]]


async def test_what_needs_nothing_is_checked_nowhere(there: Nodes) -> None:
    there.have("old", servekit="0.0.1")
    assert await NodeChecks().faults(replace(ORDER, want=None)) == {}
    assert there.looks == []


async def test_a_node_that_fails_is_logged_with_the_reason(there: Nodes) -> None:
    there.have("good")
    there.have("old", servekit="0.0.1")
    checks = NodeChecks()
    with capture_logs() as logs:
        faults = await checks.faults(ORDER)
        await checks.faults(ORDER)
    assert [(log["event"], log["node"], log["reason"]) for log in logs] == [
        ("node_unsuitable", "old", faults["old"])
    ], "once for each check"
