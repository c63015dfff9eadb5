"""The process that talks to Ray: it executes the supervisor's requests and reports events.

It holds no essential state. When it dies, the workers keep serving, the next driver finds their
actors by name, and the supervisor's own connections to them are unaffected.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec
import ray
import structlog
from msgspec.structs import replace

from servekit.protocol.control import ray_messages as c
from servekit.protocol.control.ray_messages import Node, ToCluster
from servekit.protocol.messages import Ping, Stop
from servekit.protocol.transport.connection import Connection, adopt_socket
from servekit.ray.process import actor_handle, namespace_lock, nodes
from servekit.ray.process.actor import ActorEvents
from servekit.ray.process.actor_handle import ActorHandle, Gone
from servekit.ray.process.namespace_lock import NamespaceOwner
from servekit.ray.process.node_checks import LOOK_S, NodeChecks
from servekit.ray.process.node_selection import choose_node
from servekit.system.parent_death import end_group

log: Any = structlog.get_logger("servekit.ray.process")

#: Margin of the supervisor's timeout for the nodes' checks, to report which node did not answer.
_SOONER_S = 2.0
#: How long a node is avoided after a worker was lost on it, since Ray notices later.
_SHUN_S = 30.0
#: Interval between reads of the list of nodes.
_WATCH_EVERY_S = 1.0
#: The supervisor's interval for the GPUs of its own machine.
_MEASURE_EVERY_S = 5.0
_LEFT = "it is no longer a node of the Ray cluster"


async def run_driver(control: socket.socket) -> int:
    """Run until the supervisor is gone, or closes the connection."""
    driver = Driver()
    await driver.read_messages(control)
    return await driver.over


class Driver:
    """State and message loop of the process. Change state only on the event loop."""

    def __init__(self) -> None:
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._control: Connection[ToCluster] = Connection(ToCluster, self._take, self._on_eof)
        self._grace_s = 0.0
        self._actors: dict[str, ActorHandle] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        self._intended: dict[str, tuple[str, str]] = {}  # by worker: its model and node
        self._shunned: dict[str, float] = {}  # end of the avoidance, by node
        self._nodes: dict[str, Node] = {}  # current nodes, by Ray's id
        self._wants: tuple[c.NodeRequirements, ...] = ()  # what models need of nodes
        self._checks = NodeChecks()
        self._tasks: set[asyncio.Task[None]] = set()

    async def read_messages(self, control: socket.socket) -> None:
        await adopt_socket(control, lambda: self._control)

    def _on_eof(self, error: Exception | None) -> None:
        log.info("supervisor_lost", error=str(error or "EOF"))
        end_group()  # Ray's shutdown may hang, and nothing of ours depends on it

    # ---- requests

    def _take(self, message: ToCluster) -> None:
        match message:
            case c.JoinCluster():
                self._spawn(self._answer(message.id, self._join(message)))
            case c.InspectNodes():
                self._spawn(self._answer(message.id, self._find_place(message)))
            case c.PlaceWorker():
                task = self._spawn(self._answer(message.id, self._place_worker(message)))
                self._making[message.name] = task
            case c.Start():
                self._spawn(self._answer(message.id, self._start(message)))
            case c.Signal(name, number, group):
                if (actor := self._actors.get(name)) is not None:
                    self._spawn(actor.signal(number, group=group))
            case c.GetStrayMemory():
                self._spawn(self._answer(message.id, self._strays(message)))
            case c.ReleasePlace():
                self._spawn(self._answer(message.id, self._free_place(message)))
            case Ping():
                self._control.send(c.DriverAlive())
            case Stop():
                self._on_eof(None)
            case c.KeepPlaces(names):
                for name in self._actors.keys() - set(names):
                    self._spawn(self._forget(name))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, id: int, work: Coroutine[Any, Any, msgspec.Struct]) -> None:
        try:
            answer = await work
        except (Gone, ConnectionError) as error:
            answer = c.RequestFailed(id, str(error))
        except Exception as error:
            log.exception("ray_request_failed")
            answer = c.RequestFailed(id, f"Ray: {type(error).__name__}: {error}")
        self._control.send(answer)

    # ---- the cluster

    async def _join(self, order: c.JoinCluster) -> msgspec.Struct:
        self._grace_s = order.grace_s
        until = time.monotonic() + order.within_s - _SOONER_S
        tenant = NamespaceOwner.for_this_process(order.turn, order.since, order.run_dir)
        await asyncio.to_thread(_connect_to_ray, order.address, order.namespace, tenant)
        turn = namespace_lock.own_turn(order.turn)
        if refusal := await namespace_lock.await_ownership(order.namespace, turn):
            return c.RequestFailed(order.id, refusal)
        self._wants = order.wants
        await self._update_nodes(await nodes.living_nodes(), _left_s(until))
        for actor in await asyncio.to_thread(actor_handle.find_actors):
            await self._take_over(actor)
        await asyncio.to_thread(actor_handle.sweep_places)
        if order.watch:
            self._spawn(self._watch())
        own = ray.get_runtime_context().get_node_id()
        return c.ClusterJoined(order.id, tuple(self._nodes.values()), turn, own)

    async def _find_place(self, order: c.InspectNodes) -> msgspec.Struct:
        until = time.monotonic() + order.within_s - _SOONER_S
        there = await nodes.living_nodes()
        if order.node and order.node not in there:
            return c.RequestFailed(order.id, _LEFT)
        if not order.node:
            self._wants = order.wants  # also for nodes that join later
        asked = [there[order.node]] if order.node else there.values()
        looks = await nodes.look_at(asked, order.wants, _left_s(until))
        if order.node and not looks:
            return c.RequestFailed(order.id, _LEFT)
        self._checks.record(looks, order.wants)
        return c.NodesInspected(order.id, looks)

    async def _update_nodes(self, there: dict[str, dict[str, Any]], within_s: float) -> None:
        """Update the nodes; new ones check themselves."""
        new = [there[id] for id in there.keys() - self._nodes.keys()]
        looks = await nodes.look_at(new, self._wants, within_s)
        self._checks.record(looks, self._wants)
        known = self._nodes | {look.node: look for look in looks}
        self._nodes = {id: node for id, node in known.items() if id in there}

    async def _watch(self) -> None:
        """Report nodes that join and leave."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                there = await nodes.living_nodes()
            except Exception as error:  # as while its control plane restarts
                log.warning("ray_nodes_unknown", reason=str(error))
                continue
            if there.keys() != self._nodes.keys():
                await self._update_nodes(there, LOOK_S)
                self._control.send(c.Nodes(tuple(self._nodes.values())))

    async def _take_over(self, actor: ActorHandle) -> None:
        try:
            await actor.inspect()
        except Gone:
            self._spawn(actor.release_place())
            return
        if actor.name in self._actors:
            self._spawn(actor.release_place())
            return
        log.info("actor_adopted", worker=actor.name)
        self._actors[actor.name] = actor
        self._follow(actor)

    # ---- places

    async def _place_worker(self, order: c.PlaceWorker) -> msgspec.Struct:
        if (known := self._actors.get(order.name)) is not None:
            if (state := await self._matching_state(known, order)) is not None:
                known.model = order.model
                return c.WorkerPlaced(order.id, state.host, state.gpus, state.running)
            await self._forget(order.name)
        aim = functools.partial(self._aim, order)
        waits = functools.partial(self._waits, order.name)
        try:
            actor = await actor_handle.make_actor(order, self._grace_s, self._checks, aim, waits)
        finally:
            self._intended.pop(order.name, None)
        self._actors[order.name] = actor
        self._follow(actor)
        assert actor.state is not None
        if actor.state.fault:
            await self._forget(order.name)
            return c.RequestFailed(order.id, f"node {actor.state.host}: {actor.state.fault}")
        return c.WorkerPlaced(order.id, actor.state.host, actor.state.gpus)

    async def _matching_state(self, actor: ActorHandle, order: c.PlaceWorker) -> Any:
        """Return the state of a place that fits the order; None if it does not."""
        try:
            state = await actor.inspect()
        except Gone:
            self._avoid_node(actor)
            return None
        if len(state.gpus) != order.gpus or state.fault or order.node not in ("", state.node):
            return None
        if state.running is not None and state.running.fingerprint != order.fingerprint:
            await actor.end_process()
            return replace(state, running=None)
        return state

    def _waits(self, name: str, what: str) -> None:
        self._control.send(c.PlacementWaits(name, what))

    async def _aim(self, order: c.PlaceWorker, faults: Mapping[str, str]) -> str:
        self._intended.pop(order.name, None)
        free = await asyncio.to_thread(actor_handle.free_nodes)
        now = time.monotonic()
        shunned = {node for node, until in self._shunned.items() if until > now} | faults.keys()
        held = [
            one.state.node
            for one in self._actors.values()
            if one.model == order.model and one.state is not None
        ]
        held += [node for model, node in self._intended.values() if model == order.model]
        node = choose_node(free, order.cpus, order.gpus, order.strategy, held, shunned)
        self._intended[order.name] = (order.model, node)  # before another place is chosen
        return node

    def _avoid_node(self, actor: ActorHandle) -> None:
        if actor.state is not None:
            self._shunned[actor.state.node] = time.monotonic() + _SHUN_S

    async def _start(self, order: c.Start) -> msgspec.Struct:
        if (actor := self._actors.get(order.name)) is None:
            return c.RequestFailed(order.id, "its place in the cluster is lost")
        pid, address, refusal = await actor.start(order)
        if refusal or not address:
            return c.RequestFailed(order.id, refusal or "it ended before it listened", pid=pid)
        return c.Started(order.id, pid, address)

    async def _strays(self, question: c.GetStrayMemory) -> msgspec.Struct:
        actor = self._actors.get(question.name)
        return c.StrayMemory(question.id, "" if actor is None else await actor.strays())

    async def _free_place(self, order: c.ReleasePlace) -> msgspec.Struct:
        if (making := self._making.get(order.name)) is not None:
            making.cancel()
            await asyncio.wait((making,))
        await self._forget(order.name)
        return c.PlaceReleased(order.id)

    async def _forget(self, name: str) -> None:
        if (following := self._following.pop(name, None)) is not None:
            following.cancel()
        if (actor := self._actors.pop(name, None)) is not None:
            await actor.release_place()

    # ---- events

    def _follow(self, actor: ActorHandle) -> None:
        self._following[actor.name] = self._spawn(self._follow_actor(actor))

    async def _follow_actor(self, actor: ActorHandle) -> None:
        measuring = self._spawn(self._measure(actor))
        try:
            await self._forward_events(actor)
        finally:
            measuring.cancel()

    async def _measure(self, actor: ActorHandle) -> None:
        while True:
            with contextlib.suppress(Gone):  # a lost actor is noticed by polling
                found = await actor.measure()
                measured = found.gpus, found.pid, found.held, found.rss_bytes
                self._control.send(c.Measured(actor.name, *measured))
            await asyncio.sleep(_MEASURE_EVERY_S)

    async def _forward_events(self, actor: ActorHandle) -> None:
        seen, ended = -1, -1
        while True:
            try:
                events = await actor.poll(seen, ended)
            except Gone as error:
                self._report_lost(actor, str(error))
                return
            seen = events.seen
            if events.lines:
                self._control.send(c.Lines(actor.name, events.lines))
            if events.code is not None:
                self._control.send(_as_exited(actor.name, events))
                ended = events.pid

    def _report_lost(self, actor: ActorHandle, why: str) -> None:
        log.warning("actor_lost", worker=actor.name, reason=why)
        self._avoid_node(actor)
        self._following.pop(actor.name, None)
        if self._actors.get(actor.name) is actor:
            del self._actors[actor.name]
        self._spawn(actor.release_place())
        self._control.send(c.Exited(actor.name, 0, None, None, f"its node or actor is lost: {why}"))


def _as_exited(name: str, events: ActorEvents) -> c.Exited:
    assert events.code is not None
    died = events.code < 0
    return c.Exited(
        name,
        events.pid,
        None if died else events.code,
        -events.code if died else None,
        out_of_memory=events.out_of_memory,
    )


def _connect_to_ray(address: str, namespace: str, tenant: NamespaceOwner) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        address,
        namespace=namespace,
        job_config=tenant.job_config,
        log_to_driver=False,
        configure_logging=False,
    )


def _left_s(until: float) -> float:
    """Return the seconds left on the monotonic clock, at least 1."""
    return max(1.0, until - time.monotonic())
