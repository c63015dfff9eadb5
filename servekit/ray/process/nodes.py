"""The list of nodes, and what each finds when it checks itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import ray
from msgspec.structs import replace
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from servekit.protocol.control import ray_messages as c
from servekit.protocol.control.ray_messages import Node
from servekit.ray.process.node_probe import probe_node

#: Ray announces a new node a moment before it can run tasks there.
_KNOWN_S = 5.0
_LOOK_EVERY_S = 0.2


async def living_nodes() -> dict[str, dict[str, Any]]:
    """Return the nodes that Ray considers alive, by Ray's ids."""
    return {node["NodeID"]: node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}


async def look_at(
    nodes: Iterable[dict[str, Any]], wants: tuple[c.NodeRequirements, ...], within_s: float
) -> tuple[Node, ...]:
    """Return what each node finds, or why it could not be checked.

    Nodes that leave the cluster meanwhile are left out: Ray lists a lost node for some seconds.
    """
    found = tuple(await asyncio.gather(*(_probe(node, wants, within_s) for node in nodes)))
    if not any(node.problem for node in found):
        return found
    try:
        there = await living_nodes()
    except Exception:  # as while the control plane restarts
        return found
    return tuple(node for node in found if not node.problem or node.node in there)


async def _probe(
    node: dict[str, Any], wants: tuple[c.NodeRequirements, ...], within_s: float
) -> Node:
    total = node["Resources"]
    known = Node(
        node["NodeID"],
        node["NodeManagerAddress"],
        float(total.get("CPU", 0.0)),
        float(total.get("GPU", 0.0)),
    )
    there = NodeAffinitySchedulingStrategy(known.node, soft=False)
    task = ray.remote(probe_node).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
    try:
        answer = await asyncio.wait_for(_await_probe(task, msgspec.msgpack.encode(wants)), within_s)
    except TimeoutError:
        return replace(known, problem=f"it has not answered within {within_s:.0f} s")
    except ModuleNotFoundError as error:
        return replace(known, problem=f"servekit is not installed there ({error})")
    except Exception as error:
        return replace(known, problem=_last_line(error))
    found = msgspec.msgpack.decode(answer, type=Node)
    return replace(found, host=known.host, cpus=known.cpus, gpus=known.gpus)


async def _await_probe(task: Any, wants: bytes) -> bytes:
    """Run the check. Raises Ray's errors; a new node gets some time to become schedulable."""
    until = time.monotonic() + _KNOWN_S
    while True:
        try:
            return bytes(await task.remote(wants))
        except ray.exceptions.TaskUnschedulableError:
            if time.monotonic() >= until:
                raise
            await asyncio.sleep(_LOOK_EVERY_S)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("No module named 'servekit" in line for line in lines):
        return "servekit is not installed there"
    return lines[-1] if lines else type(error).__name__
