"""On which nodes a worker cannot run: each is asked once, before one of a model is placed there.

Those that are there at the start, or when a reload brings a model, have been asked then; others
come later, by an autoscaler or by an operator's hand. One that has failed may be set right, and is
asked again; of one that has not nothing is asked twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import structlog

from servekit.protocol.ray_messages import Berth, Node, Want
from servekit.ray.node_inventory import own_versions
from servekit.ray.node_requirements import unfit
from servekit.ray.process import nodes
from servekit.ray.process.node_selection import all_of

log: Any = structlog.get_logger("servekit.ray.process")

#: For a node to look at itself.
LOOK_S = 20.0
#: After so long one that has failed is asked again.
AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class _Look:
    """What a node has found, in terms of one Want, and when, on the monotonic clock."""

    fault: str  # a sentence
    at: float


class NodeChecks:
    """What is known of the nodes."""

    def __init__(self) -> None:
        self._own = own_versions()
        self._looks: dict[tuple[str, Want], _Look] = {}  # by Ray's id, and what was asked

    def note(self, found: Iterable[Node], wants: Iterable[Want]) -> None:
        """That is what nodes have found when they were asked for these."""
        at, wants = time.monotonic(), list(wants)
        for node in found:
            for want in wants:
                self._looks[node.node, want] = _Look(unfit(node, self._own, want.model), at)

    async def faults(self, wish: Berth, of: str = "") -> dict[str, str]:
        """Of nodes that are large enough for it, or of that one: why it cannot run there, by id."""
        if wish.want is None:
            return {}
        there = await nodes.alive()
        self._looks = {known: look for known, look in self._looks.items() if known[0] in there}
        asked = [there[of]] if of in there else list(there.values())
        large = [one.node for one in all_of(asked) if one.fits(wish.cpus, wish.gpus)]
        await self._ask([there[node] for node in large], wish.want)
        looks = {node: self._looks.get((node, wish.want)) for node in large}  # it may be gone
        return {node: look.fault for node, look in looks.items() if look and look.fault}

    async def _ask(self, there: Iterable[dict[str, Any]], want: Want) -> None:
        """Those of which it is not known, or not any more."""
        due = [node for node in there if self._is_due(node["NodeID"], want)]
        found = await nodes.look_at(due, (want,), LOOK_S)
        self.note(found, (want,))
        for node in found:
            if fault := self._looks[node.node, want].fault:
                log.warning("nothing is placed on a node", node=node.host, reason=fault)

    def _is_due(self, node: str, want: Want) -> bool:
        look = self._looks.get((node, want))
        return look is None or bool(look.fault and time.monotonic() >= look.at + AGAIN_S)
