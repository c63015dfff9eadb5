"""Choice of a node for a worker: a pure function of free resources and other workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Free:
    """Free resources of a node."""

    node: str
    cpus: float
    gpus: float

    def has_room(self, cpus: float, gpus: int) -> bool:
        return self.cpus + 1e-6 >= cpus and self.gpus + 1e-6 >= gpus


def choose_node(
    free: Sequence[Free],
    cpus: float,
    gpus: int,
    strategy: Literal["PACK", "SPREAD"],
    held: Sequence[str],
    shunned: Collection[str] = (),
) -> str:
    """Return the node for one more worker of a model; "" if none has room now.

    `held` are the nodes of its other workers, one entry each. SPREAD prefers the fewest of these,
    then the most free resources; PACK the opposite. `shunned` nodes were lost a moment ago, which
    Ray may not have noticed.
    """
    count = Counter(held)
    fitting = [one for one in free if one.node not in shunned and one.has_room(cpus, gpus)]
    if strategy == "SPREAD":
        fitting.sort(key=lambda one: (count[one.node], -one.gpus, -one.cpus, one.node))
    else:
        fitting.sort(key=lambda one: (-count[one.node], one.gpus, one.cpus, one.node))
    return fitting[0].node if fitting else ""


def waiting_for(
    cpus: float, gpus: int, nodes: Sequence[Free], faults: Mapping[str, str] | None = None
) -> str:
    """Describe what an unplaced worker waits for. `nodes` have their total resources.

    `faults` are reasons by node why the worker cannot run there, regardless of room.
    """
    faults = faults or {}
    what = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else f"{cpus:g} CPU{'s' * (cpus != 1)}"
    but = "".join(f"; {faults[node]}" for node in sorted(faults))
    large = [node for node in nodes if node.has_room(cpus, gpus)]
    if any(node.node not in faults for node in large):
        return f"waits for {what} in the Ray cluster{but}"
    beside = f" beside {cpus:g} CPU{'s' * (cpus != 1)}" if gpus else ""
    if large:
        return f"waits for another node with {what}{beside}{but}"
    return f"waits for a node with {what}{beside}: the Ray cluster has none that large now"


def all_of(nodes: Sequence[Mapping[str, Any]]) -> list[Free]:
    """Return the total resources of each living node in `ray.nodes()`."""
    alive = [(node["NodeID"], node["Resources"]) for node in nodes if node.get("Alive")]
    return [Free(name, has.get("CPU", 0.0), has.get("GPU", 0.0)) for name, has in alive]


def free_of(totals: Sequence[Mapping[str, object]], available: Mapping[str, object]) -> list[Free]:
    """Return the free resources of each living node, from `ray.nodes()` and Ray's state."""
    found: list[Free] = []
    for node in totals:
        name = str(node["NodeID"])
        left = available.get(name)
        if node.get("Alive") and isinstance(left, Mapping):
            found.append(Free(name, float(left.get("CPU", 0.0)), float(left.get("GPU", 0.0))))
    return found
