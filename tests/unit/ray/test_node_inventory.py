"""What a Ray cluster's nodes can serve, by their own reports: the test answers for the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from servekit.config.schema import ModelConfig
from servekit.config.sections.cluster import RayConfig
from servekit.protocol.control.ray_messages import (
    InspectNodes,
    Node,
    NodeRequirements,
    NodesInspected,
)
from servekit.ray.client import Cluster, Unable
from servekit.ray.node_inventory import NodeInventory, own_versions

OWN = own_versions()
GOOD = Node("id-1", "10.0.0.2", 4, 2, OWN.python, OWN.ray, OWN.servekit)
OLD = replace(GOOD, node="id-2", host="10.0.0.3", servekit="0.0.1")
MODEL = ModelConfig(name="m", path="/models/m")


class Answers:
    """A cluster that gives one answer, and keeps what it is asked."""

    def __init__(self, *nodes: Node, error: Unable | None = None, silent: bool = False) -> None:
        self.nodes, self.error, self.silent = nodes, error, silent
        self.asked: list[InspectNodes] = []

    async def ask_driver(self, make: Callable[[int], msgspec.Struct]) -> Any:
        self.asked.append(cast(InspectNodes, make(7)))
        if self.silent:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return NodesInspected(7, self.nodes)

    @property
    def cluster(self) -> Cluster:
        return cast(Cluster, self)


def inventory(*nodes: Node, **settings: Any) -> NodeInventory:
    made = NodeInventory(RayConfig(**settings))
    made.nodes = nodes
    return made


def test_our_own_versions_are_those_that_are_installed() -> None:
    assert OWN.servekit and OWN.python.startswith("3.") and OWN.ray[0].isdigit()


def test_a_model_takes_gpus_where_some_node_has_them() -> None:
    two = MODEL.model_copy(update={"gpus_per_replica": 2})
    assert inventory(replace(GOOD, gpus=0), GOOD).gpus_for(two) == 2
    assert inventory(replace(GOOD, gpus=0)).gpus_for(two) == 0
    assert inventory().gpus_for(two) == 0


def test_nodes_that_were_seen_are_judged_by_what_each_worker_claims() -> None:
    assert inventory(GOOD).refusal([MODEL]) == ""
    assert "needs 4.5 CPUs beside 1 GPU" in inventory(GOOD, cpus=4.5).refusal([MODEL])
    assert inventory(GOOD, cpus=4.5, autoscaled=True).refusal([MODEL]) == ""
    assert "10.0.0.3 has servekit 0.0.1" in inventory(OLD).refusal([MODEL])


async def test_the_nodes_examine_themselves_anew_for_a_reload() -> None:
    made, there = inventory(OLD, connect_s=20), Answers(GOOD)
    assert await made.query_nodes(there.cluster, [MODEL]) == ""
    assert made.nodes == (GOOD,)
    want = NodeRequirements("m", "transformers", "/models/m")
    assert there.asked == [InspectNodes(7, 20, (want,))]
    assert "has servekit 0.0.1" in await made.query_nodes(Answers(OLD).cluster, [MODEL])


async def test_a_cluster_that_cannot_be_asked_refuses_a_reload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = inventory(GOOD)
    gone = Answers(error=Unable("it has died"))
    said = await made.query_nodes(gone.cluster, [MODEL])
    assert said == "the Ray cluster cannot be asked: it has died"
    monkeypatch.setattr(made, "_settings", RayConfig().model_copy(update={"connect_s": 0.01}))
    said = await made.query_nodes(Answers(silent=True).cluster, [MODEL])
    assert said == "the Ray cluster has not answered within 0.01 s"
    assert made.nodes == (GOOD,), "as last seen"


async def test_a_node_without_fault_is_not_asked_again() -> None:
    there = Answers()
    assert await inventory().fault(there.cluster, GOOD) == ""
    assert there.asked == []


async def test_a_node_with_a_fault_may_have_been_repaired_and_is_asked_alone() -> None:
    made, repaired = inventory(connect_s=20), Answers(replace(OLD, servekit=OWN.servekit))
    assert await made.fault(repaired.cluster, OLD) == ""
    assert repaired.asked == [InspectNodes(7, 20, (), "id-2")]
    assert "has servekit 0.0.1" in await made.fault(Answers(OLD).cluster, OLD)
    lost = Answers(error=Unable("that node is gone"))
    assert await made.fault(lost.cluster, OLD) == "that node is gone"
