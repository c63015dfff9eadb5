"""Search by Ray for room for a worker, on a node that can run it.

Ray's calls block, so each runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from servekit.protocol.control.ray_messages import PlaceWorker
from servekit.ray.process.node_checks import AGAIN_S, NodeChecks
from servekit.ray.process.node_selection import all_of, waiting_for

_LOOK_EVERY_S = 0.1
#: Ray needs a moment even if there is room.
_PATIENCE_S = 1.0
#: Interval between updates of what a worker waits for.
_SAY_S = 1.0
_NODE = "ray.io/node-id"

#: Function from the nodes that cannot run it, with reasons, to the preferred node; "" if none.
Aim = Callable[[Mapping[str, str]], Awaitable[str]]


async def make_place(
    order: PlaceWorker, checks: NodeChecks, aim: Aim, waits: Callable[[str], None]
) -> tuple[str, Any]:
    """Return the name and the placement group of a place. `waits` receives what it waits for.

    A node that was not checked before is checked first.
    """
    while True:
        label, faults = place_name(order), await checks.faults(order)
        node = await aim(faults)
        making = asyncio.create_task(asyncio.to_thread(_create_group, order, label, node, faults))
        try:
            group = await asyncio.shield(making)
            found = await _has_room(group, order, faults, waits)
            if found and not await checks.faults(order, await asyncio.to_thread(_node_of, group)):
                waits("")
                return label, group
        except BaseException:
            await asyncio.shield(_undo_group(making))
            raise
        await _undo_group(making)


def place_name(order: PlaceWorker) -> str:
    """Return a unique name for a place."""
    return f"{order.name}#{secrets.token_hex(4)}"


async def _undo_group(making: asyncio.Task[Any]) -> None:
    """Release a group, including one that a thread is still creating."""
    with contextlib.suppress(Exception):
        await asyncio.to_thread(remove_placement_group, await making)


def _create_group(order: PlaceWorker, label: str, node: str, faults: Mapping[str, str]) -> Any:
    bundle = {"CPU": order.cpus, **({"GPU": float(order.gpus)} if order.gpus else {})}
    others = [{_NODE: f"!in({','.join(sorted(faults))})"}] if faults else None
    return placement_group(
        [bundle],
        "STRICT_PACK",
        name=label,
        lifetime="detached",
        _soft_target_node_id=node or None,
        bundle_label_selector=others,
    )


async def _has_room(
    group: Any, order: PlaceWorker, faults: Mapping[str, str], waits: Callable[[str], None]
) -> bool:
    """Wait for room; return False when failed nodes should be checked again.

    `waits` is called if it takes long, and on every change.
    """
    said, say_at = "", time.monotonic() + _PATIENCE_S
    until = time.monotonic() + AGAIN_S if faults else math.inf
    while not await asyncio.to_thread(group.wait, 0):
        if time.monotonic() >= until:
            return False
        if time.monotonic() >= say_at:
            before, say_at = said, time.monotonic() + _SAY_S
            there = all_of(await asyncio.to_thread(ray.nodes))
            if (said := waiting_for(order.cpus, order.gpus, there, faults)) != before:
                waits(said)
        await asyncio.sleep(_LOOK_EVERY_S)  # Ray has no event for it
    return True


def _node_of(group: Any) -> str:
    """Return the node of the bundle; "" if it is lost already."""
    where = placement_group_table(group).get("bundles_to_node_id", {})
    return str(where.get(0) or "")
