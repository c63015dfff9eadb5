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

from servekit.protocol import ray_messages as c
from servekit.protocol.messages import Stop
from servekit.protocol.ray_messages import Node, ToCluster
from servekit.protocol.transport.connection import Connection, adopt_socket
from servekit.ray.process import actor_handle as berths
from servekit.ray.process import namespace_lock, nodes
from servekit.ray.process.actor import ActorEvents, Figures
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


async def run_driver(control: socket.socket) -> int:
    """Run until the supervisor is gone, or closes the connection."""
    driver = Driver()
    await driver.hear(control)
    return await driver.over


class Driver:
    """State and message loop of the process. Change state only on the event loop."""

    def __init__(self) -> None:
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._control: Connection[ToCluster] = Connection(ToCluster, self._take, self._on_eof)
        self._grace_s = 0.0
        self._berths: dict[str, ActorHandle] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._making: dict[str, asyncio.Task[None]] = {}
        self._intended: dict[str, tuple[str, str]] = {}  # by worker: its model and node
        self._shunned: dict[str, float] = {}  # end of the avoidance, by node
        self._nodes: dict[str, Node] = {}  # current nodes, by Ray's id
        self._wants: tuple[c.Want, ...] = ()  # what models need of nodes
        self._scouts = NodeChecks()
        self._tasks: set[asyncio.Task[None]] = set()

    async def hear(self, control: socket.socket) -> None:
        await adopt_socket(control, lambda: self._control)

    def _on_eof(self, error: Exception | None) -> None:
        log.info("supervisor_lost", error=str(error or "EOF"))
        end_group()  # Ray's shutdown may hang, and nothing of ours depends on it

    # ---- requests

    def _take(self, message: ToCluster) -> None:
        match message:
            case c.Join():
                self._spawn(self._answer(message.id, self._join(message)))
            case c.Look():
                self._spawn(self._answer(message.id, self._look(message)))
            case c.Berth():
                task = self._spawn(self._answer(message.id, self._berth(message)))
                self._making[message.name] = task
            case c.Start():
                self._spawn(self._answer(message.id, self._start(message)))
            case c.Signal(name, number, group):
                if (berth := self._berths.get(name)) is not None:
                    self._spawn(berth.signal(number, group=group))
            case c.Strays():
                self._spawn(self._answer(message.id, self._strays(message)))
            case c.Vacate():
                self._spawn(self._answer(message.id, self._vacate(message)))
            case Stop():
                self._on_eof(None)
            case c.Keep(names):
                for name in self._berths.keys() - set(names):
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
            answer = c.Sorry(id, str(error))
        except Exception as error:
            log.exception("ray_request_failed")
            answer = c.Sorry(id, f"Ray: {type(error).__name__}: {error}")
        self._control.send(answer)

    # ---- the cluster

    async def _join(self, wish: c.Join) -> msgspec.Struct:
        self._grace_s = wish.grace_s
        until = time.monotonic() + wish.within_s - _SOONER_S
        tenant = NamespaceOwner.here(wish.turn, wish.since, wish.run_dir)
        await asyncio.to_thread(_connect_to_ray, wish.address, wish.namespace, tenant)
        turn = namespace_lock.own_turn(wish.turn)
        if refusal := await namespace_lock.await_ownership(wish.namespace, turn):
            return c.Sorry(wish.id, refusal)
        self._wants = wish.wants
        await self._meet(await nodes.living_nodes(), _left_s(until))
        for berth in await asyncio.to_thread(berths.find_actors):
            await self._take_over(berth)
        await asyncio.to_thread(berths.sweep_places)
        if wish.watch:
            self._spawn(self._watch())
        own = ray.get_runtime_context().get_node_id()
        return c.Joined(wish.id, tuple(self._nodes.values()), turn, own)

    async def _look(self, wish: c.Look) -> msgspec.Struct:
        until = time.monotonic() + wish.within_s - _SOONER_S
        there = await nodes.living_nodes()
        if wish.node and wish.node not in there:
            return c.Sorry(wish.id, "it is no longer a node of the Ray cluster")
        if not wish.node:
            self._wants = wish.wants  # also for nodes that join later
        asked = [there[wish.node]] if wish.node else there.values()
        looks = await nodes.look_at(asked, wish.wants, _left_s(until))
        self._scouts.note(looks, wish.wants)
        return c.Looked(wish.id, looks)

    async def _meet(self, there: dict[str, dict[str, Any]], within_s: float) -> None:
        """Update the nodes; new ones check themselves."""
        new = [there[id] for id in there.keys() - self._nodes.keys()]
        looks = await nodes.look_at(new, self._wants, within_s)
        self._scouts.note(looks, self._wants)
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
                await self._meet(there, LOOK_S)
                self._control.send(c.Nodes(tuple(self._nodes.values())))

    async def _take_over(self, berth: ActorHandle) -> None:
        try:
            await berth.look()
        except Gone:
            self._spawn(berth.vacate())
            return
        if berth.name in self._berths:
            self._spawn(berth.vacate())
            return
        log.info("actor_adopted", worker=berth.name)
        self._berths[berth.name] = berth
        self._follow(berth)

    # ---- places

    async def _berth(self, wish: c.Berth) -> msgspec.Struct:
        if (known := self._berths.get(wish.name)) is not None:
            if (sight := await self._suits(known, wish)) is not None:
                known.model = wish.model
                return c.Berthed(wish.id, sight.host, sight.gpus, sight.running)
            await self._forget(wish.name)
        aim = functools.partial(self._aim, wish)
        waits = functools.partial(self._waits, wish.name)
        try:
            berth = await berths.make_actor(wish, self._grace_s, self._scouts, aim, waits)
        finally:
            self._intended.pop(wish.name, None)
        self._berths[wish.name] = berth
        self._follow(berth)
        assert berth.sight is not None
        if berth.sight.fault:
            await self._forget(wish.name)
            return c.Sorry(wish.id, f"node {berth.sight.host}: {berth.sight.fault}")
        return c.Berthed(wish.id, berth.sight.host, berth.sight.gpus)

    async def _suits(self, berth: ActorHandle, wish: c.Berth) -> Any:
        """Return the state of a place that may be used as wished; None if it may not."""
        try:
            sight = await berth.look()
        except Gone:
            self._shun(berth)
            return None
        if len(sight.gpus) != wish.gpus or sight.fault or wish.node not in ("", sight.node):
            return None
        if sight.running is not None and sight.running.fingerprint != wish.fingerprint:
            await berth.end()
            return replace(sight, running=None)
        return sight

    def _waits(self, name: str, what: str) -> None:
        self._control.send(c.Waits(name, what))

    async def _aim(self, wish: c.Berth, faults: Mapping[str, str]) -> str:
        self._intended.pop(wish.name, None)
        free = await asyncio.to_thread(berths.free_nodes)
        now = time.monotonic()
        shunned = {node for node, until in self._shunned.items() if until > now} | faults.keys()
        held = [
            one.sight.node
            for one in self._berths.values()
            if one.model == wish.model and one.sight is not None
        ]
        held += [node for model, node in self._intended.values() if model == wish.model]
        node = choose_node(free, wish.cpus, wish.gpus, wish.strategy, held, shunned)
        self._intended[wish.name] = (wish.model, node)  # before another place is chosen
        return node

    def _shun(self, berth: ActorHandle) -> None:
        if berth.sight is not None:
            self._shunned[berth.sight.node] = time.monotonic() + _SHUN_S

    async def _start(self, order: c.Start) -> msgspec.Struct:
        if (berth := self._berths.get(order.name)) is None:
            return c.Sorry(order.id, "its place in the cluster is lost")
        pid, address, refusal = await berth.start(order)
        if refusal or not address:
            return c.Sorry(order.id, refusal or "it ended before it listened", pid=pid)
        return c.Started(order.id, pid, address)

    async def _strays(self, question: c.Strays) -> msgspec.Struct:
        berth = self._berths.get(question.name)
        return c.Held(question.id, "" if berth is None else await berth.strays())

    async def _vacate(self, wish: c.Vacate) -> msgspec.Struct:
        if (making := self._making.get(wish.name)) is not None:
            making.cancel()
            await asyncio.wait((making,))
        await self._forget(wish.name)
        return c.Vacated(wish.id)

    async def _forget(self, name: str) -> None:
        if (following := self._following.pop(name, None)) is not None:
            following.cancel()
        if (berth := self._berths.pop(name, None)) is not None:
            await berth.vacate()

    # ---- events

    def _follow(self, berth: ActorHandle) -> None:
        self._following[berth.name] = self._spawn(self._hear_of(berth))

    async def _hear_of(self, berth: ActorHandle) -> None:
        measuring = self._spawn(self._measure(berth))
        try:
            await self._hear_news(berth)
        finally:
            measuring.cancel()

    async def _measure(self, berth: ActorHandle) -> None:
        while True:
            with contextlib.suppress(Gone):  # a lost actor is noticed by polling
                found = await berth.measure()
                self._control.send(_as_measured(berth.name, found))
            await asyncio.sleep(_MEASURE_EVERY_S)

    async def _hear_news(self, berth: ActorHandle) -> None:
        seen = 0
        while True:
            try:
                news = await berth.poll(seen)
            except Gone as error:
                self._lose(berth, str(error))
                return
            seen = news.seen
            if news.lines:
                self._control.send(c.Lines(berth.name, news.lines))
            if news.code is not None:
                self._control.send(_as_exited(berth.name, news))

    def _lose(self, berth: ActorHandle, why: str) -> None:
        log.warning("actor_lost", worker=berth.name, reason=why)
        self._shun(berth)
        self._following.pop(berth.name, None)
        if self._berths.get(berth.name) is berth:
            del self._berths[berth.name]
        self._spawn(berth.vacate())
        self._control.send(c.Exited(berth.name, 0, None, None, f"its node or actor is lost: {why}"))


def _as_measured(name: str, found: Figures) -> c.Measured:
    return c.Measured(name, found.gpus, found.pid, found.held, found.rss_bytes)


def _as_exited(name: str, news: ActorEvents) -> c.Exited:
    assert news.code is not None
    died = news.code < 0
    return c.Exited(
        name,
        news.pid,
        None if died else news.code,
        -news.code if died else None,
        out_of_memory=news.out_of_memory,
    )


def _connect_to_ray(address: str, namespace: str, tenant: NamespaceOwner) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        address,
        namespace=namespace,
        job_config=tenant.note,
        log_to_driver=False,
        configure_logging=False,
    )


def _left_s(until: float) -> float:
    """Return the seconds left on the monotonic clock, at least 1."""
    return max(1.0, until - time.monotonic())
