"""The supervisor's side of the process that talks to Ray: each question has one answer, or fails.

There is no Ray here: the test answers for the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servekit.config.sections.cluster import RayConfig
from servekit.protocol.control.ray_messages import (
    ClusterJoined,
    DriverAlive,
    Exited,
    InspectNodes,
    JoinCluster,
    KeepPlaces,
    Lines,
    Node,
    Nodes,
    NodesInspected,
    PlacementWaits,
    RequestFailed,
)
from servekit.protocol.messages import Ping, Stop
from servekit.ray import client
from servekit.ray.client import Cluster, Unable
from tests.polling import poll_async
from tests.unit.supervisor.test_gateway_process import Alone

HEAD, OTHER = Node("id-1", "10.0.0.1"), Node("id-2", "10.0.0.2")


class Child:
    """Keeps what the process is sent."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    def note_segments(self) -> tuple[()]:
        return ()

    pid = 7

    def kill(self, cause: str) -> None:
        self.sent.append(Stop())

    async def dump_and_kill(self, cause: str) -> None:
        self.kill(cause)


class Listener:
    """Keeps what it is told of workers."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def waits(self, name: str, what: str) -> None:
        self.told.append((name, what))

    def lines(self, name: str, lines: tuple[str, ...]) -> None:
        self.told.append((name, *lines))

    def exited(self, message: Exited) -> None:
        self.told.append(message)

    def check(self) -> None:
        pass


class Stage:
    def __init__(self, folder: Path) -> None:
        self.host = Alone(folder / "run")
        self.child, self.listener = Child(), Listener()
        listener: Any = self.listener
        self.cluster = Cluster(self.host, RayConfig(), "space", (), listener, watch=True)
        self.start()

    def start(self) -> None:
        child: Any = self.child
        self.cluster.child = child
        self.cluster.change_state("start")
        self.cluster.send_greeting()

    @property
    def join(self) -> JoinCluster:
        found = [one for one in self.child.sent if isinstance(one, JoinCluster)]
        return found[-1]

    def let_join(self, *nodes: Node, turn: int = 3) -> None:
        self.cluster.receive(ClusterJoined(self.join.id, nodes, turn, HEAD.node))


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.host.run_dir.unlock()


def inspect(id: int) -> InspectNodes:
    return InspectNodes(id, within_s=1.0, wants=())


async def test_it_joins_with_its_settings_and_knows_the_nodes(stage: Stage) -> None:
    seen: list[tuple[Node, ...]] = []
    stage.cluster.on_nodes = lambda: seen.append(stage.cluster.nodes)
    assert (stage.join.namespace, stage.join.watch, stage.join.turn) == ("space", True, 0)
    assert not stage.cluster.there.is_set()
    stage.let_join(HEAD)
    assert await stage.cluster.joined == (HEAD,)
    assert stage.cluster.own == "id-1" and stage.cluster.state == "ready"
    stage.cluster.receive(Nodes((HEAD, OTHER)))
    assert seen == [(HEAD,), (HEAD, OTHER)]


async def test_a_second_process_joins_in_the_turn_of_the_first(stage: Stage) -> None:
    stage.let_join(HEAD)
    stage.cluster.forget_child()
    stage.start()
    assert stage.join.turn == 3 and not stage.cluster.there.is_set()
    stage.let_join(HEAD, OTHER)
    assert stage.cluster.nodes == (HEAD, OTHER) and stage.cluster.there.is_set()


async def test_a_cluster_that_cannot_be_joined_says_why(stage: Stage) -> None:
    stage.cluster.receive(RequestFailed(stage.join.id, "no head there"))
    with pytest.raises(Unable, match="no head there"):
        await stage.cluster.joined


async def test_questions_wait_for_the_cluster_and_are_answered_by_their_ids(stage: Stage) -> None:
    asked = [asyncio.create_task(stage.cluster.ask_driver(inspect)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(isinstance(one, InspectNodes) for one in stage.child.sent)
    stage.let_join(HEAD)
    await poll_async("both are sent", lambda: len(stage.child.sent) == 3)
    first, second = (one.id for one in stage.child.sent if isinstance(one, InspectNodes))
    assert first != second != stage.join.id
    stage.cluster.receive(NodesInspected(second, (OTHER,)))
    stage.cluster.receive(RequestFailed(first, "it is gone", pid=7))
    stage.cluster.receive(NodesInspected(first, ()))  # an answer to nobody
    assert (await asked[1]).nodes == (OTHER,)
    with pytest.raises(Unable, match="it is gone") as caught:
        await asked[0]
    assert caught.value.pid == 7 and isinstance(caught.value, OSError)


async def test_the_death_of_the_process_fails_what_was_asked(stage: Stage) -> None:
    stage.let_join(HEAD)
    asked = asyncio.create_task(stage.cluster.ask_driver(inspect))
    await asyncio.sleep(0)
    stage.cluster.forget_child()
    with pytest.raises(Unable, match="has died"):
        await asked
    assert not stage.cluster.there.is_set()


async def test_a_process_that_dies_before_it_has_joined_fails_the_start(stage: Stage) -> None:
    stage.cluster.forget_child()
    with pytest.raises(Unable, match="its client has died"):
        await stage.cluster.joined


async def test_what_is_asked_after_its_death_fails_at_once(stage: Stage) -> None:
    stage.let_join(HEAD)
    stage.cluster.child = None
    with pytest.raises(Unable, match="has died"):
        await stage.cluster.ask_driver(inspect)
    stage.cluster.notify(KeepPlaces(()))  # dropped


async def test_news_of_workers_is_passed_on(stage: Stage) -> None:
    gone = Exited("a/0", 7, None, None, "its node is gone")
    for message in (PlacementWaits("a/0", "a GPU"), Lines("a/0", ("one", "two")), gone):
        stage.cluster.receive(message)
    assert stage.listener.told == [("a/0", "a GPU"), ("a/0", "one", "two"), gone]
    stage.cluster.keep_places(("a/0",))
    assert stage.child.sent[-1] == KeepPlaces(("a/0",))


async def test_a_process_that_does_not_answer_is_killed_and_any_message_is_an_answer(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.let_join(HEAD)
    stage.cluster.check_health()
    assert stage.child.sent[-1] == Ping(0)
    assert stage.cluster.silent_s > 0
    stage.cluster.receive(DriverAlive())
    assert stage.cluster.silent_s == 0
    monkeypatch.setattr(client, "_PING_EVERY_S", 0.0)
    monkeypatch.setattr(client, "SILENT_S", 0.0)
    stage.cluster.check_health()
    stage.cluster.receive(Nodes((HEAD,)))
    stage.cluster.check_health()
    assert stage.cluster.state == "ready"
    stage.cluster.check_health()
    assert (stage.cluster.state, stage.cluster.stalls) == ("stalled", 1)
    await poll_async("it is killed", lambda: stage.child.sent[-1] == Stop())
