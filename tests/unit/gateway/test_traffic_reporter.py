"""Reports of traffic: each second while there is any, and none at rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from servekit.gateway.http.limits import LIMITS, Sweep
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.traffic_reporter import TRAFFIC_EVERY_S, TrafficReporter
from servekit.protocol.control.metrics_messages import Counted
from servekit.protocol.messages import (
    AccessRules,
    KeyRule,
    KeyUsage,
    SamplingParams,
    Topology,
    Traffic,
)
from tests.passing_time import Clock, passing_time


class Scene:
    """A reporter that runs, the connections of its gateway, and what the supervisor hears."""

    has_supervisor = True

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.heard: list[tuple[float, Any]] = []
        self.router = Router("gateway/0")
        self.reporter = TrafficReporter(self.router, self)  # type: ignore[arg-type]
        self.connections: set[Any] = set()
        state = SimpleNamespace(connections=self.connections, default_headers=[])
        server: Any = SimpleNamespace(
            server_state=state, config=SimpleNamespace(encoded_headers=[])
        )
        self.sweep = Sweep(server, LIMITS, self.reporter.stir)

    def send(self, message: Any) -> None:
        self.heard.append((self.clock(), message))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for _, message in self.heard if isinstance(message, kind)]

    def connect(self) -> None:
        self.connections.add(Mock())
        self.sweep.start_timer()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    with passing_time() as clock:
        scene = Scene(clock)
        running = asyncio.create_task(scene.reporter.run())
        await clock.pass_time(1.0)
        yield scene
        running.cancel()
        scene.sweep.stop_timer()


async def test_at_rest_it_does_not_wake_up(scene: Scene) -> None:
    await scene.clock.pass_time(3600.0)
    assert scene.clock.wakes == []


async def test_while_there_are_connections_it_reports_each_second(scene: Scene) -> None:
    scene.connect()
    for count in range(1, 11):
        scene.router.requests += 1
        scene.router.measures.answers["/x", 200] += 1
        await scene.clock.pass_time(TRAFFIC_EVERY_S)
        assert scene.of(Traffic)[-1].requests == count
    assert len(scene.of(Traffic)) == len(scene.of(Counted)) == 10
    await scene.clock.pass_time(100.0)
    assert len(scene.of(Traffic)) == 10, "nothing has changed"
    scene.router.requests += 1
    scene.connections.clear()
    await scene.clock.pass_time(3.0)
    assert scene.of(Traffic)[-1].requests == 11
    scene.clock.wakes.clear()
    await scene.clock.pass_time(3600.0)
    assert scene.clock.wakes == []


async def test_a_request_without_a_connection_is_told_of_at_the_next_ping(scene: Scene) -> None:
    scene.router.requests += 1
    scene.reporter.look_at_rest()
    assert [one.requests for one in scene.of(Traffic)] == [1]
    scene.router.measures.answers["/x", 200] += 1
    await scene.clock.pass_time(1.1 * TRAFFIC_EVERY_S)
    assert len(scene.of(Counted)) == 1, "where there was one, there may be more"
    scene.clock.wakes.clear()
    for _ in range(100):
        scene.reporter.look_at_rest()
        await scene.clock.pass_time(4.0)
    assert len(scene.heard) == 2 and len(scene.clock.wakes) <= 1


async def test_what_runs_keeps_it_awake_without_connections(scene: Scene) -> None:
    scene.router._open.add(call := object())  # type: ignore[arg-type]
    scene.reporter.stir()
    await scene.clock.pass_time(10.0)
    scene.router.requests = 5
    await scene.clock.pass_time(1.1 * TRAFFIC_EVERY_S)
    assert scene.of(Traffic)[-1].requests == 5
    scene.router._open.remove(call)  # type: ignore[arg-type]
    await scene.clock.pass_time(3.0)
    scene.clock.wakes.clear()
    await scene.clock.pass_time(3600.0)
    assert scene.clock.wakes == []


async def test_other_gateways_hear_at_once_what_a_limited_key_has_under_way(scene: Scene) -> None:
    rules = AccessRules(tuple(KeyRule(name, max_concurrent=2) for name in ("alice", "bob")))
    for gateways, told in ((1, []), (2, [("alice", 2)])):
        scene.heard.clear()
        scene.router.apply_topology(Topology((), gateways=gateways, access=rules))
        alice = scene.router.access.callers["alice"]
        for _ in range(2):
            alice.on_started(call())
        await scene.clock.pass_time(0.02)
        uses = [use for spent in scene.of(KeyUsage) for use in spent.uses]
        assert [(use.name, use.active) for use in uses] == told
        for _ in range(2):
            alice.on_ended(call(), "ok", None)
    await scene.clock.pass_time(0.02)
    assert [use.active for spent in scene.of(KeyUsage) for use in spent.uses] == [2, 0]


def call() -> InflightRequest:
    return InflightRequest("m", SamplingParams(), prompt="x")
