"""Nodes that cannot run a worker: each is checked once before a model is first placed there.

Nodes that exist at the start, or when a reload adds a model, are checked then; others join later,
by an autoscaler or an operator. A node that failed may be repaired, and is checked again; one that
passed is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from servekit.protocol.control.ray_messages import Node, NodeRequirements, PlaceWorker
from servekit.ray.node_inventory import own_versions
from servekit.ray.node_requirements import why_unfit
from servekit.ray.process import nodes
from servekit.ray.process.node_selection import all_of

log: Any = structlog.get_logger("servekit.ray.process")

#: Timeout of a node's check.
LOOK_S = 20.0
#: Pause until a node that failed is checked again.
AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Look:
    """Result of a node's check for one NodeRequirements, with the time on the monotonic clock."""

    fault: str  # a sentence
    at: float


class NodeChecks:
    """Results of the nodes' checks."""

    def __init__(self) -> None:
        self._own = own_versions()
        self._looks: dict[
            tuple[str, NodeRequirements], _Look
        ] = {}  # by Ray's id, and what was asked

    def record(self, found: Iterable[Node], wants: Iterable[NodeRequirements]) -> None:
        """Store what nodes have found for these models."""
        at, wants = time.monotonic(), list(wants)
        for node in found:
            for want in wants:
                self._looks[node.node, want] = _Look(why_unfit(node, self._own, want.model), at)

    async def faults(self, order: PlaceWorker, of: str = "") -> dict[str, str]:
        """Return why nodes that are large enough, or node `of`, cannot run it, by id."""
        if order.want is None:
            return {}
        there = await nodes.living_nodes()
        self._looks = {known: look for known, look in self._looks.items() if known[0] in there}
        asked = [there[of]] if of in there else list(there.values())
        large = [one.node for one in all_of(asked) if one.has_room(order.cpus, order.gpus)]
        await self._check_nodes([there[node] for node in large], order.want)
        looks = {node: self._looks.get((node, order.want)) for node in large}  # a node may be gone
        return {node: look.fault for node, look in looks.items() if look and look.fault}

    async def _check_nodes(self, there: Iterable[dict[str, Any]], want: NodeRequirements) -> None:
        """Check the nodes whose result is missing or outdated."""
        due = [node for node in there if self._is_due(node["NodeID"], want)]
        found = await nodes.look_at(due, (want,), LOOK_S)
        self.record(found, (want,))
        for node in found:
            if fault := self._looks[node.node, want].fault:
                log.warning("node_unsuitable", node=node.host, reason=fault)

    def _is_due(self, node: str, want: NodeRequirements) -> bool:
        look = self._looks.get((node, want))
        return look is None or bool(look.fault and time.monotonic() >= look.at + AGAIN_S)
