"""Checks of whether a cluster's nodes can run the configuration: pure, with one-sentence results.

Only nodes on which some worker could be placed count: a head without resources needs no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from servekit.config.engines.options import KINDS
from servekit.config.schema import ModelConfig
from servekit.protocol.control.ray_messages import Node


@dataclass(frozen=True, slots=True)
class Need:
    """Resources that each worker of a model claims, all on one node."""

    model: str
    gpus: int
    cpus: float


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions installed on the supervisor's machine."""

    servekit: str
    python: str
    ray: str


def gpus_for(model: ModelConfig, *, any_there: bool) -> int:
    """Return the number of GPUs per worker of a model; 0: the CPU. `any_there`: nodes have GPUs."""
    needs = KINDS[model.engine].gpu_here
    if model.device == "cpu" or (needs == "never" and model.device != "cuda"):
        return 0
    wanted = model.device == "cuda" or needs == "must" or any_there
    return model.gpus_per_replica if wanted else 0


def in_words(model: ModelConfig) -> str:
    """Describe the device of a model's workers before the nodes are known."""
    least, most = (gpus_for(model, any_there=any_there) for any_there in (False, True))
    if not most:
        return "cpu, on a Ray node"
    return (
        f"{_count_noun(most, 'GPU')} of a Ray node{'' if least else ', or its cpu if none has any'}"
    )


def refusal_of_nodes(
    nodes: Sequence[Node], own: Versions, needs: Sequence[Need], *, grows: bool = False
) -> str:
    """Return why these nodes cannot serve the configuration; "" if they can.

    `grows`: other nodes may join later, including larger ones.
    """
    return next(filter(None, _list_refusals(nodes, own, needs, grows)), "")


def _list_refusals(
    nodes: Sequence[Node], own: Versions, needs: Sequence[Need], grows: bool
) -> Iterator[str]:
    for need in needs:
        if not grows and not any(fits_node(node, need) for node in nodes):
            yield _too_large(nodes, need)
    for node in nodes:
        for need in needs:
            if fits_node(node, need):
                yield why_unfit(node, own, need.model)


def why_unfit(node: Node, own: Versions, model: str) -> str:
    """Return why no worker of a model can run on a node, regardless of room; "" if one can."""
    if node.problem:
        return f"the Ray node {node.host} cannot run workers: {node.problem}"
    lack = node.lacks.get(model)
    lacking = f"model {model!r} could be placed on the Ray node {node.host}, and {lack}"
    return next(_list_differences(node, own), lacking if lack else "")


def node_fault(node: Node, own: Versions) -> str:
    """Return why no process of ours can run on a node; "" if one can."""
    return node.problem or next(_list_differences(node, own), "")


def sites_of(nodes: Sequence[Node], own: str, in_use: Mapping[str, str]) -> dict[str, Node]:
    """Return the nodes for gateways by address: one on each machine except ours (`own`).

    Of several nodes at one address, the one in `in_use` stays; else it is the first.
    """
    here = {node.host for node in nodes if node.node == own}
    found: dict[str, Node] = {}
    for node in sorted(nodes, key=lambda node: (node.node != in_use.get(node.host), node.node)):
        if node.host not in here:
            found.setdefault(node.host, node)
    return found


def fits_node(node: Node, need: Need) -> bool:
    """Return whether a worker fits the node while nothing else runs there."""
    return node.gpus >= need.gpus and node.cpus >= need.cpus


def _too_large(nodes: Sequence[Node], need: Need) -> str:
    if need.gpus and not any(node.gpus >= need.gpus for node in nodes):
        most = max(nodes, key=lambda node: node.gpus)
        return (
            f"model {need.model!r} needs {_count_noun(need.gpus, 'GPU')} on one node of the Ray "
            f"cluster for each replica, and the largest, {most.host}, has {most.gpus:g}"
        )
    with_gpus = [node for node in nodes if node.gpus >= need.gpus]
    most = max(with_gpus, key=lambda node: node.cpus)
    beside = f" beside {_count_noun(need.gpus, 'GPU')}" if need.gpus else ""
    return (
        f"model {need.model!r} needs {_count_noun(need.cpus, 'CPU')}{beside} on one node of the Ray"
        f" cluster for each replica, and the largest, {most.host}, has {most.cpus:g}; `ray.cpus`"
        " says how many"
    )


def _list_differences(node: Node, own: Versions) -> Iterator[str]:
    pairs = (
        ("servekit", node.servekit, own.servekit),
        ("Python", _minor_version(node.python), _minor_version(own.python)),
        ("Ray", node.ray, own.ray),
    )
    for what, there, here in pairs:
        if there != here and not node.problem:
            has = f"has {what} {there}" if there else f"has no {what} that its Python finds"
            yield (
                f"the Ray node {node.host} {has}, and this one has {here}: install the same on all"
                " nodes"
            )


def _minor_version(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _count_noun(number: float, what: str) -> str:
    return f"{number:g} {what}{'s' * (number != 1)}"
