"""Handle of one process's place in the cluster, made and released through Ray's calls.

Ray's own calls block, so each runs in a thread. Calls of an actor are awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
import structlog
from ray.util import list_named_actors
from ray.util.placement_group import (
    get_placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from servekit.protocol.control.ray_messages import PlaceWorker, Start
from servekit.ray.process import placement_groups
from servekit.ray.process.actor import ActorEvents, ActorState, Figures, ProcessActor
from servekit.ray.process.node_checks import NodeChecks
from servekit.ray.process.node_selection import Free, free_of

log: Any = structlog.get_logger("servekit.ray.process")

#: Time for Ray to start an actor where there is room, and for an actor to answer.
_ACTOR_S = 60.0
_ANSWER_S = 5.0
#: Time for Ray to release a place.
_GONE_S = 10.0
#: Threads of an actor: waiting calls must not block others.
_THREADS = 16
#: Longest wait of one poll for events.
POLL_S = 5.0
#: More than a driver takes to open its GPUs: repeated calls would fill the actor's threads.
_MEASURE_S = 90.0


class Gone(Exception):
    """The actor or its node is gone."""


class ActorHandle:
    """A placement group and its actor, which have the name `label` in the namespace.

    An actor that claims nothing has no group.
    """

    def __init__(self, label: str, group: Any, actor: Any) -> None:
        self.label = label
        self.name = name_of(label)
        self._group = group
        self._actor = actor
        self.state: ActorState | None = None
        self.model = ""

    async def inspect(self) -> ActorState:
        """Return the node and what runs there. Raises Gone."""
        answer = await self._call(self._actor.inspect, within_s=_ANSWER_S)
        self.state = msgspec.msgpack.decode(answer, type=ActorState)
        return self.state

    async def start(self, order: Start) -> tuple[int, str, str]:
        """Start a process: return its PID and address, or why it failed. Raises Gone."""
        sent = msgspec.msgpack.encode(order)
        answer: tuple[int, str, str] = await self._call(self._actor.start, sent, within_s=180.0)
        return answer

    async def poll(self, seen: int, ended: int) -> ActorEvents:
        """Return events as soon as there are any; `ended` as in the actor. Raises Gone."""
        answer = await self._call(self._actor.poll, seen, POLL_S, ended, within_s=POLL_S + 10.0)
        return msgspec.msgpack.decode(answer, type=ActorEvents)

    async def signal(self, number: int, *, group: bool) -> None:
        with contextlib.suppress(Gone):
            await self._call(self._actor.signal, number, group, within_s=_ANSWER_S)

    async def strays(self) -> str:
        """Return a message about GPU memory that its worker holds elsewhere. Raises Gone."""
        return str(await self._call(self._actor.strays, within_s=10.0))

    async def measure(self) -> Figures:
        """Return the resource use. Raises Gone."""
        answer = await self._call(self._actor.measure, within_s=_MEASURE_S)
        return msgspec.msgpack.decode(answer, type=Figures)

    async def end_process(self) -> None:
        """Kill the process, and wait for its end."""
        with contextlib.suppress(Gone):
            await self._call(self._actor.kill_process, within_s=_ANSWER_S)

    async def release_place(self) -> None:
        """Release the place, and return when Ray has done so."""
        await self.end_process()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Exception):
                ray.kill(self._actor, no_restart=True)
        if self._group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self._group)
        deadline = time.monotonic() + _GONE_S
        while self.label in list_named_actors() and time.monotonic() < deadline:
            time.sleep(0.05)

    async def _call(self, method: Any, *args: Any, within_s: float) -> Any:
        try:
            return await asyncio.wait_for(method.remote(*args), within_s)
        except TimeoutError:
            raise Gone(f"its node has not answered within {within_s:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise Gone(_first_line(error)) from None
        except ray.exceptions.RayError as error:
            raise Gone(_first_line(error)) from None


async def make_actor(
    order: PlaceWorker,
    grace_s: float,
    checks: NodeChecks,
    aim: placement_groups.Aim,
    waits: Callable[[str], None],
) -> ActorHandle:
    """Have Ray place a process, on the node from `aim` if possible. Raises Gone.

    `waits` receives what it waits for. A process that must be on a certain node claims nothing
    there, and waits for nothing.
    """
    if order.node:
        return await _make_on(order, grace_s, placement_groups.place_name(order))
    label, group = await placement_groups.make_place(order, checks, aim, waits)
    handle = ActorHandle(label, group, None)
    there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    await _begin_actor(handle, there, order, grace_s)
    handle.model = order.model
    return handle


async def _make_on(order: PlaceWorker, grace_s: float, label: str) -> ActorHandle:
    """Create an actor on a certain node. Raises Gone."""
    handle = ActorHandle(label, None, None)
    await _begin_actor(
        handle, NodeAffinitySchedulingStrategy(order.node, soft=False), order, grace_s
    )
    return handle


async def _begin_actor(handle: ActorHandle, there: Any, order: PlaceWorker, grace_s: float) -> None:
    """Create the actor and wait for it. Raises Gone; after any error nothing is left."""
    making = asyncio.create_task(
        asyncio.to_thread(_create_actor, handle.label, there, order, grace_s)
    )
    try:
        handle._actor = await asyncio.shield(making)
        await _await_up(handle)
    except BaseException:
        await asyncio.shield(_undo_placement(handle, making))
        raise


async def _undo_placement(handle: ActorHandle, making: asyncio.Task[Any]) -> None:
    """Release a place, including an actor that a thread is still creating."""
    with contextlib.suppress(Exception):
        handle._actor = await making
    await asyncio.to_thread(handle._remove)  # no process was started there


def _create_actor(label: str, there: Any, order: PlaceWorker, grace_s: float) -> Any:
    options = ray.remote(ProcessActor).options(
        name=label,
        lifetime="detached",
        num_cpus=order.cpus,
        num_gpus=order.gpus,
        scheduling_strategy=there,
        max_restarts=0,
        max_concurrency=_THREADS,
    )
    return options.remote(order.gpus, grace_s)


async def _await_up(handle: ActorHandle) -> None:
    """Wait until the actor's process is up. Raises Gone."""
    answer = await handle._call(handle._actor.inspect, within_s=_ACTOR_S)
    handle.state = msgspec.msgpack.decode(answer, type=ActorState)


def find_actors() -> list[ActorHandle]:
    """Return the existing actors of earlier drivers in this namespace. Blocks."""
    found: list[ActorHandle] = []
    for label in list_named_actors():
        if "#" not in label:
            continue
        with contextlib.suppress(ValueError):  # gone meanwhile
            actor = ray.get_actor(label)
            found.append(ActorHandle(label, _find_group(label), actor))
    return found


def sweep_places() -> None:
    """Release the places in this namespace that have no actor any more. Blocks.

    Such are left by actors that ended while Ray had no head, or had only begun to start.
    """
    actors = set(list_named_actors())
    for found in placement_group_table().values():
        label = found["name"]
        gone = found["state"] == "REMOVED" or "#" not in label or label in actors
        if (
            not gone and (group := _find_group(label)) is not None
        ):  # else it is in another namespace
            log.info("placement_released", worker=name_of(label))
            remove_placement_group(group)


def _find_group(label: str) -> Any:
    with contextlib.suppress(ValueError):
        return get_placement_group(label)
    return None


def name_of(label: str) -> str:
    """Return the name of the process."""
    return label.rpartition("#")[0]


def free_nodes() -> list[Free]:
    """Return the free resources of each node. Blocks."""
    from ray._private.state import available_resources_per_node  # no public API

    return free_of(ray.nodes(), available_resources_per_node())


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
