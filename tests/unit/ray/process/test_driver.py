"""The process that talks to Ray, question by question.

There is no Ray here: actors, nodes and the namespace are made up.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("ray")

from servekit.protocol.control import ray_messages as c
from servekit.protocol.control.ray_messages import Node, NodeRequirements, RemoteGpu, Running
from servekit.protocol.messages import Stop
from servekit.ray.process import actor_handle, namespace_lock, nodes
from servekit.ray.process import driver as module
from servekit.ray.process.actor import ActorEvents, ActorState, Figures
from servekit.ray.process.actor_handle import Gone
from servekit.ray.process.driver import Driver
from servekit.ray.process.node_selection import Free
from tests.polling import poll_async

GPU = RemoteGpu(0, "GPU-a", "H200", 100)
WANT = NodeRequirements("m", "echo", "")
JOIN = c.JoinCluster(1, "head:6379", "space", 30.0, 20.0, (WANT,), "/run/a", 1.0)
PLACE = c.PlaceWorker(2, "m/0", "m", 1, 1.0, "PACK", "print", want=WANT)
START = c.Start(3, "m/0", ("--name", "m/0"), {}, b"secret", "print")


class Handle:
    """An actor, as `actor_handle` has one."""

    def __init__(self, name: str = "m/0", node: str = "n1", *gpus: RemoteGpu) -> None:
        self.name, self.model = name, ""
        self.state = ActorState(node, f"host of {node}", gpus or (GPU,), "", None)
        self.events: asyncio.Queue[ActorEvents | Gone] = asyncio.Queue()
        self.seen: list[tuple[int, int]] = []  # lines, and the process that has ended
        self.did: list[str] = []
        self.gone = False
        self.answer: tuple[int, str, str] = (7, "tcp://there:1", "")
        self.figures = Figures((), 7, {"GPU-a": 3}, 500)

    async def inspect(self) -> ActorState:
        if self.gone:
            raise Gone("its node is gone")
        return self.state

    async def start(self, order: c.Start) -> tuple[int, str, str]:
        self.did.append("start")
        return self.answer

    async def poll(self, seen: int, ended: int) -> ActorEvents:
        self.seen.append((seen, ended))
        found = await self.events.get()
        if isinstance(found, Gone):
            raise found
        return found

    async def signal(self, number: int, *, group: bool) -> None:
        self.did.append(f"signal {number} {group}")

    async def strays(self) -> str:
        return "holds 3 GiB on GPU 1"

    async def measure(self) -> Figures:
        return self.figures

    async def end_process(self) -> None:
        self.did.append("end process")

    async def release_place(self) -> None:
        self.did.append("release")


class Control:
    """The connection to the supervisor: what was said."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.sent if isinstance(one, kind)]


class Stage:
    """A driver, and whatever Ray has for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = Driver()
        self.control = Control()
        self.driver._control = self.control  # type: ignore[assignment]
        self.nodes = {"n1": self.size("n1"), "n2": self.size("n2")}
        self.free = [Free("n1", 4, 1), Free("n2", 4, 2)]
        self.looked: list[list[str]] = []
        self.found: list[Handle] = []  # actors of a driver before
        self.made: list[Handle] = []
        self.next: list[Handle | Gone] = []  # what Ray makes
        self.swept = 0
        self.refusal = ""
        self.grace: list[float] = []
        self.aims: list[str] = []
        self.faults: Mapping[str, str] = {}
        self.blocks = asyncio.Event()
        self.blocks.set()
        for name, value in {
            "living_nodes": self.living,
            "look_at": self.look,
        }.items():
            monkeypatch.setattr(nodes, name, value)
        for name, made in {
            "make_actor": self.make_actor,
            "find_actors": lambda: self.found,
            "sweep_places": self.sweep,
            "free_nodes": lambda: self.free,
        }.items():
            monkeypatch.setattr(actor_handle, name, made)
        monkeypatch.setattr(namespace_lock, "own_turn", lambda kept: kept or 5)
        monkeypatch.setattr(namespace_lock, "await_ownership", self.own)
        monkeypatch.setattr(module, "_connect_to_ray", lambda *how: None)
        context = type("Context", (), {"get_node_id": staticmethod(lambda: "n1")})
        monkeypatch.setattr("ray.get_runtime_context", context)
        monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)

    def size(self, name: str) -> dict[str, Any]:
        return {"NodeID": name, "Alive": True, "Resources": {"CPU": 4.0, "GPU": 2.0}}

    def sweep(self) -> None:
        self.swept += 1

    async def own(self, namespace: str, turn: int) -> str:
        return self.refusal

    async def living(self) -> dict[str, Any]:
        return dict(self.nodes)

    async def look(
        self, asked: Iterable[dict[str, Any]], wants: Any, within_s: float
    ) -> tuple[Node, ...]:
        self.looked.append(sorted(node["NodeID"] for node in asked))
        return tuple(Node(name, f"host of {name}") for name in self.looked[-1])

    async def make_actor(
        self, order: Any, grace_s: float, checks: Any, aim: Any, waits: Callable[[str], None]
    ) -> Handle:
        self.grace.append(grace_s)
        self.aims.append(await aim(self.faults))
        waits("1 GPU")
        await self.blocks.wait()
        found = self.next.pop(0) if self.next else Handle(order.name, self.aims[-1])
        if isinstance(found, Gone):
            raise found
        found.model = order.model
        self.made.append(found)
        return found

    def tell(self, message: Any) -> None:
        self.driver._take(message)

    async def ask(self, message: Any) -> Any:
        """Return the answer with the id of the question."""
        self.tell(message)
        await poll_async("it is answered", lambda: self.answers(message.id))
        [answer] = self.answers(message.id)
        self.control.sent.remove(answer)
        return answer

    def answers(self, id: int) -> list[Any]:
        return [one for one in self.control.sent if getattr(one, "id", None) == id]

    async def close(self) -> None:
        for task in self.driver._tasks:
            task.cancel()
        await asyncio.sleep(0)


@pytest.fixture
async def stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Stage(monkeypatch)
    yield made
    await made.close()


# ---------------------------------------------------------------- the cluster


async def test_it_joins_finds_actors_and_sweeps_places(stage: Stage) -> None:
    adopted, lost, twice = Handle("a/0"), Handle("b/0"), Handle("a/0")
    lost.gone = True
    stage.found = [adopted, lost, twice]
    joined = await stage.ask(JOIN)
    assert isinstance(joined, c.ClusterJoined)
    assert ([node.node for node in joined.nodes], joined.turn, joined.own) == (
        ["n1", "n2"],
        5,
        "n1",
    )
    assert stage.swept == 1
    await poll_async("they are released", lambda: lost.did and twice.did)
    assert (adopted.did, lost.did, twice.did) == ([], ["release"], ["release"])
    answer = await stage.ask(c.GetStrayMemory(4, "a/0"))
    assert answer.stray == "holds 3 GiB on GPU 1"
    assert (await stage.ask(c.GetStrayMemory(5, "b/0"))).stray == "", "it is not there"


async def test_a_namespace_of_another_instance_is_not_joined(stage: Stage) -> None:
    stage.refusal = "another instance holds it"
    answer = await stage.ask(JOIN)
    assert (type(answer), answer.message) == (c.RequestFailed, "another instance holds it")
    assert stage.swept == 0 and stage.looked == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("no head there"), "no head there"),
        (ValueError("a bug"), "Ray: ValueError: a bug"),
    ],
)
async def test_an_error_of_ray_is_an_answer(
    stage: Stage, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*how: object) -> None:
        raise error

    monkeypatch.setattr(module, "_connect_to_ray", fail)
    answer = await stage.ask(JOIN)
    assert (type(answer), answer.message) == (c.RequestFailed, said)


async def test_nodes_examine_themselves_when_they_are_asked(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspected = await stage.ask(c.InspectNodes(4, 20.0, (WANT,)))
    assert [node.node for node in inspected.nodes] == ["n1", "n2"]
    inspected = await stage.ask(c.InspectNodes(5, 20.0, (), "n2"))
    assert [node.node for node in inspected.nodes] == ["n2"]
    refused = await stage.ask(c.InspectNodes(6, 20.0, (), "n9"))
    assert refused.message == "it is no longer a node of the Ray cluster"

    async def lose(*asked: object) -> tuple[Node, ...]:
        return ()

    monkeypatch.setattr(nodes, "look_at", lose)
    refused = await stage.ask(c.InspectNodes(7, 20.0, (), "n2"))
    assert (type(refused), refused.message) == (
        c.RequestFailed,
        "it is no longer a node of the Ray cluster",
    ), "it left while it was asked"
    assert stage.driver._wants == (WANT,), "one node alone does not change what models need"


async def test_nodes_that_join_and_leave_are_told_where_that_is_wanted(stage: Stage) -> None:
    await stage.ask(replace(JOIN, watch=True))
    stage.nodes = {"n2": stage.nodes["n2"], "n3": stage.size("n3")}
    await poll_async("it is told", lambda: stage.control.of(c.Nodes))
    [told] = stage.control.of(c.Nodes)
    assert sorted(node.node for node in told.nodes) == ["n2", "n3"]
    assert stage.looked == [["n1", "n2"], ["n3"]], "each examines itself once"


# ---------------------------------------------------------------- places


async def test_a_place_is_made_once_and_found_again(stage: Stage) -> None:
    await stage.ask(JOIN)
    placed = await stage.ask(PLACE)
    assert (placed.host, placed.gpus, placed.running) == ("host of n1", (GPU,), None)
    assert stage.grace == [30.0]
    assert stage.control.of(c.PlacementWaits) == [c.PlacementWaits("m/0", "1 GPU")]
    again = await stage.ask(replace(PLACE, id=4))
    assert again == replace(placed, id=4) and len(stage.made) == 1


@pytest.mark.parametrize("other", ["gpus", "node", "fault", "gone"])
async def test_a_place_that_fits_no_more_is_given_back_for_another(
    stage: Stage, other: str
) -> None:
    await stage.ask(JOIN)
    await stage.ask(PLACE)
    [first] = stage.made
    order = replace(PLACE, id=4)
    if other == "gpus":
        stage.next = [Handle("m/0", "n2", GPU, GPU)]
        order = replace(order, gpus=2)
    elif other == "node":
        order = replace(order, node="n2")
    elif other == "fault":
        first.state = msgspec.structs.replace(first.state, fault="its GPU is lost")
    else:
        first.gone = True
    await stage.ask(order)
    assert first.did == ["release"] and len(stage.made) == 2
    # a lost node is avoided for a while, and n1 has one GPU only
    assert stage.aims[1] == ("n2" if other in ("gone", "gpus") else "n1")


async def test_a_process_with_another_fingerprint_is_ended_in_its_place(stage: Stage) -> None:
    running = Running(7, "tcp://there:1", "print")
    await stage.ask(JOIN)
    await stage.ask(PLACE)
    [actor] = stage.made
    actor.state = msgspec.structs.replace(actor.state, running=running)
    same = await stage.ask(replace(PLACE, id=4))
    assert (same.running, actor.did) == (running, [])
    other = await stage.ask(replace(PLACE, id=5, fingerprint="other"))
    assert (other.running, actor.did) == (None, ["end process"])


async def test_a_place_with_a_fault_is_refused_and_given_back(stage: Stage) -> None:
    await stage.ask(JOIN)
    bad = Handle("m/0", "n1")
    bad.state = msgspec.structs.replace(bad.state, fault="its GPU is lost")
    stage.next = [bad]
    refused = await stage.ask(PLACE)
    assert refused.message == "node host of n1: its GPU is lost"
    assert bad.did == ["release"]


async def test_a_place_that_ray_cannot_make_is_told(stage: Stage) -> None:
    await stage.ask(JOIN)
    stage.next = [Gone("the actor died")]
    assert (await stage.ask(PLACE)).message == "the actor died"


async def test_workers_that_are_placed_at_the_same_time_know_of_each_other(stage: Stage) -> None:
    """Else SPREAD would put both on the node with the most room."""
    await stage.ask(JOIN)
    stage.blocks.clear()
    spread = replace(PLACE, strategy="SPREAD")
    for number in range(2):
        stage.tell(replace(spread, id=10 + number, name=f"m/{number}"))
        await poll_async("it is aimed", functools.partial(has_length, stage.aims, number + 1))
    assert stage.aims == ["n2", "n1"]
    stage.blocks.set()


def has_length(found: list[str], count: int) -> bool:
    return len(found) == count


async def test_nodes_that_cannot_run_it_are_not_aimed_at(stage: Stage) -> None:
    await stage.ask(JOIN)
    stage.faults = {"n1": "it is old"}
    await stage.ask(PLACE)
    assert stage.aims == ["n2"]


async def test_a_place_is_released_and_one_that_is_being_made_given_up(stage: Stage) -> None:
    await stage.ask(JOIN)
    await stage.ask(PLACE)
    [actor] = stage.made
    assert isinstance(await stage.ask(c.ReleasePlace(4, "m/0")), c.PlaceReleased)
    assert actor.did == ["release"]
    stage.blocks.clear()
    stage.tell(replace(PLACE, id=5))
    await poll_async("it is being made", lambda: len(stage.aims) == 2)
    assert isinstance(await stage.ask(c.ReleasePlace(6, "m/0")), c.PlaceReleased)
    assert len(stage.made) == 1 and stage.answers(5) == []
    assert isinstance(await stage.ask(c.ReleasePlace(7, "nobody/0")), c.PlaceReleased)


async def test_places_that_are_no_longer_needed_are_released(stage: Stage) -> None:
    kept, other = Handle("a/0"), Handle("b/0")
    stage.found = [kept, other]
    await stage.ask(JOIN)
    stage.tell(c.KeepPlaces(("a/0", "c/0")))
    await poll_async("it is released", lambda: other.did)
    assert (kept.did, other.did) == ([], ["release"])


# ---------------------------------------------------------------- processes


async def test_a_process_is_started_in_its_place(stage: Stage) -> None:
    await stage.ask(JOIN)
    lost = await stage.ask(START)
    assert lost.message == "its place in the cluster is lost"
    await stage.ask(PLACE)
    started = await stage.ask(START)
    assert (started.pid, started.address) == (7, "tcp://there:1")
    [actor] = stage.made
    for answer, said in (
        ((7, "", "no memory"), "no memory"),
        ((7, "", ""), "it ended before it listened"),
    ):
        actor.answer = answer
        failed = await stage.ask(START)
        assert (type(failed), failed.message, failed.pid) == (c.RequestFailed, said, 7)


async def test_signals_reach_a_process_that_is_there(stage: Stage) -> None:
    await stage.ask(JOIN)
    await stage.ask(PLACE)
    stage.tell(c.Signal("nobody/0", 9))
    stage.tell(c.Signal("m/0", 9, group=True))
    stage.tell(c.Signal("m/0", 12))
    [actor] = stage.made
    await poll_async("it got them", lambda: len(actor.did) == 2)
    assert actor.did == ["signal 9 True", "signal 12 False"]


async def test_lines_ends_and_figures_of_a_process_are_passed_on(stage: Stage) -> None:
    await stage.ask(JOIN)
    await stage.ask(PLACE)
    [actor] = stage.made
    actor.events.put_nowait(ActorEvents(("one", "two"), 2))
    actor.events.put_nowait(ActorEvents((), 2))
    actor.events.put_nowait(ActorEvents(("three",), 3, 7, 3))
    actor.events.put_nowait(ActorEvents((), 3, 8, -9, True))
    await poll_async("all is told", lambda: len(stage.control.of(c.Exited)) == 2)
    assert [lines.lines for lines in stage.control.of(c.Lines)] == [("one", "two"), ("three",)]
    assert stage.control.of(c.Exited) == [
        c.Exited("m/0", 7, 3, None),
        c.Exited("m/0", 8, None, 9, out_of_memory=True),
    ]
    assert actor.seen[:5] == [(-1, -1), (2, -1), (2, -1), (3, 7), (3, 8)]
    [measured] = stage.control.of(c.Measured)
    assert measured == c.Measured("m/0", (), 7, {"GPU-a": 3}, 500)


async def test_the_loss_of_an_actor_is_told_and_its_node_avoided(stage: Stage) -> None:
    await stage.ask(JOIN)
    await stage.ask(PLACE)
    [first] = stage.made
    first.events.put_nowait(Gone("the node died"))
    await poll_async("it is told", lambda: stage.control.of(c.Exited))
    why = "its node or actor is lost: the node died"
    assert stage.control.of(c.Exited) == [c.Exited("m/0", 0, None, None, why)]
    await poll_async("it is released", lambda: first.did)
    assert (await stage.ask(START)).message == "its place in the cluster is lost"
    await stage.ask(replace(PLACE, id=4))
    assert stage.aims == ["n1", "n2"]


# ---------------------------------------------------------------- its end


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    monkeypatch.setattr(module, "end_group", lambda: found.append("end"))
    yield found


async def test_it_ends_when_it_is_told_or_alone(stage: Stage, ended: list[str]) -> None:
    stage.tell(Stop())
    assert ended == ["end"]
    stage.driver._on_eof(None)
    assert ended == ["end", "end"]
