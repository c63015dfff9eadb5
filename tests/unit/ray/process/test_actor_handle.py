"""An actor and its place, as Ray makes, finds and gives them back.

There is no Ray here: its actors, groups and names are made up.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("ray")
from ray.exceptions import RayActorError, RayTaskError

from servekit.protocol.control.ray_messages import PlaceWorker
from servekit.ray.process import actor_handle as module
from servekit.ray.process import placement_groups
from servekit.ray.process.actor import ActorEvents, ActorState, Figures
from servekit.ray.process.actor_handle import (
    ActorHandle,
    Gone,
    find_actors,
    make_actor,
    name_of,
    sweep_places,
)

STATE = ActorState("n1", "10.0.0.2", (), "", None)
NODE = "2" * 56  # Ray checks the form of its ids
ORDER = PlaceWorker(1, "m/0", "m", 2, 1.5, "PACK", "print")


class Method:
    """A method of an actor: it answers, raises, or is silent (None)."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    async def remote(self, *args: Any) -> Any:
        self.asked.append(args)
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Actor:
    def __init__(self, **answers: Any) -> None:
        known = {"inspect": msgspec.msgpack.encode(STATE), "kill_process": 0} | answers
        for name, answer in known.items():
            setattr(self, name, Method(answer))


class Ray:
    """The names, groups and actors that there are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, Actor] = {}
        self.groups: dict[str, dict[str, Any]] = {}  # of all namespaces, by name
        self.others: set[str] = set()  # groups of another namespace
        self.removed: list[str] = []
        self.killed: list[Actor] = []
        self.options: list[dict[str, Any]] = []
        self.made: list[tuple[Any, ...]] = []
        self.next: list[Any] = []
        self.stays = False  # a name stays for a while after its actor
        for name, value in {
            "list_named_actors": lambda: list(self.actors),
            "get_placement_group": self.group,
            "remove_placement_group": self.removed.append,
            "placement_group_table": lambda: self.groups,
            "_GONE_S": 0.05,
        }.items():
            monkeypatch.setattr(module, name, value)
        function = type("Function", (), {"options": staticmethod(self.take_options)})
        monkeypatch.setattr("ray.remote", lambda kind: function)
        monkeypatch.setattr("ray.get_actor", self.find)
        monkeypatch.setattr("ray.kill", self.kill)

    def group(self, name: str) -> str:
        if name not in self.groups or name in self.others:
            raise ValueError(name)
        return name

    def find(self, name: str) -> Actor:
        if (found := self.actors[name]) is None:
            raise ValueError("it is gone")
        return found

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)
        if not self.stays:
            self.actors = {name: one for name, one in self.actors.items() if one is not actor}

    def take_options(self, **options: Any) -> Any:
        self.options.append(options)

        def make(*args: Any) -> Actor:
            self.made.append(args)
            made = self.next.pop(0) if self.next else Actor()
            if isinstance(made, Exception):
                raise made
            self.actors[options["name"]] = made
            return made

        return type("Made", (), {"remote": staticmethod(make)})

    def add_group(self, name: str, state: str = "CREATED") -> None:
        self.groups[name] = {"name": name, "state": state}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    return Ray(monkeypatch)


# ---------------------------------------------------------------- calls


async def test_answers_of_an_actor_are_decoded() -> None:
    events, figures = ActorEvents(("a",), 1), Figures((), 7, {}, 5)
    actor = Actor(
        poll=msgspec.msgpack.encode(events), measure=msgspec.msgpack.encode(figures),
        strays="none", start=(7, "tcp://x:1", ""),
    )  # fmt: skip
    handle = ActorHandle("m/0#ab", None, actor)
    assert await handle.inspect() == STATE == handle.state
    assert await handle.poll(3, 7) == events
    assert await handle.measure() == figures
    assert await handle.strays() == "none"
    assert handle.name == "m/0"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RayActorError(error_msg="The actor died.\nMore of it."), "The actor died."),
        (None, "its node has not answered within 0.01 s"),
    ],
)
async def test_an_actor_that_does_not_answer_is_gone(
    error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.01)
    handle = ActorHandle("m/0#ab", None, Actor(inspect=error, signal=error, kill_process=error))
    with pytest.raises(Gone, match=said.replace(".", r"\.")):
        await handle.inspect()
    await handle.signal(9, group=True)  # nobody is there to get it
    await handle.end_process()


async def test_an_error_within_an_actor_is_told_in_one_line() -> None:
    kind: Any = RayTaskError
    error = kind("f", "Traceback\n  File a.py", ValueError("wrong"))
    handle = ActorHandle("m/0#ab", None, Actor(inspect=error))
    with pytest.raises(Gone) as caught:
        await handle.inspect()
    assert "\n" not in str(caught.value) and str(caught.value)


# ---------------------------------------------------------------- a place is made


async def place(order: PlaceWorker) -> ActorHandle:
    async def aim(faults: object) -> str:
        return ""

    checks: Any = None
    return await make_actor(order, 30.0, checks, aim, lambda what: None)


async def test_an_actor_is_made_in_its_group_and_claims_what_is_ordered(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make_place(*how: object) -> tuple[str, Any]:
        ray.add_group("m/0#ab")
        return "m/0#ab", "m/0#ab"

    monkeypatch.setattr(placement_groups, "make_place", make_place)
    handle = await place(ORDER)
    assert (handle.label, handle.model, handle.state) == ("m/0#ab", "m", STATE)
    [options] = ray.options
    strategy = options.pop("scheduling_strategy")
    assert strategy.placement_group == "m/0#ab" and strategy.placement_group_bundle_index == 0
    assert (options["name"], options["lifetime"], options["max_restarts"]) == (
        "m/0#ab", "detached", 0,
    )  # fmt: skip
    assert (options["num_cpus"], options["num_gpus"], ray.made) == (1.5, 2, [(2, 30.0)])


async def test_an_actor_on_a_given_node_has_no_group(ray: Ray) -> None:
    handle = await place(replace(ORDER, node=NODE, gpus=0, cpus=0.0))
    [options] = ray.options
    strategy = options["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (NODE, False)
    assert handle.label.startswith("m/0#")
    await handle.release_place()
    assert len(ray.killed) == 1 and ray.removed == []


async def test_nothing_is_left_of_an_actor_that_does_not_come_up(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make_place(*how: object) -> tuple[str, Any]:
        return "m/0#ab", "the group"

    monkeypatch.setattr(placement_groups, "make_place", make_place)
    dead = Actor(inspect=RayActorError(error_msg="it died at once"))
    ray.next = [dead]
    with pytest.raises(Gone, match="it died at once"):
        await place(ORDER)
    assert (ray.killed, ray.removed) == ([dead], ["the group"])
    ray.next = [ValueError("no such resource")]
    with pytest.raises(ValueError, match="no such resource"):
        await place(ORDER)
    assert ray.removed == ["the group", "the group"]


# ---------------------------------------------------------------- a place is given back


async def test_the_process_ends_before_its_place_is_given_back(ray: Ray) -> None:
    actor = Actor()
    ray.actors["m/0#ab"] = actor
    await ActorHandle("m/0#ab", "the group", actor).release_place()
    ended: Any = actor
    assert ended.kill_process.asked == [()]
    assert (ray.killed, ray.removed, ray.actors) == ([actor], ["the group"], {})


async def test_a_name_that_stays_is_not_waited_for_for_ever(ray: Ray) -> None:
    actor = Actor()
    ray.actors["m/0#ab"], ray.stays = actor, True
    await ActorHandle("m/0#ab", None, actor).release_place()
    assert ray.killed == [actor]


# ---------------------------------------------------------------- what is found


def test_actors_of_a_driver_before_are_found_with_their_groups(ray: Ray) -> None:
    ray.actors = {"m/0#ab": Actor(), "gateway/h#cd": Actor(), "of another program": Actor()}
    ray.actors["gone#ef"] = None  # type: ignore[assignment]
    ray.add_group("m/0#ab")
    found = {one.label: one for one in find_actors()}
    assert {label: one.name for label, one in found.items()} == {
        "m/0#ab": "m/0",
        "gateway/h#cd": "gateway/h",
    }
    assert found["m/0#ab"]._group == "m/0#ab" and found["gateway/h#cd"]._group is None


def test_places_without_an_actor_are_given_back(ray: Ray) -> None:
    for name in ("m/0#ab", "m/1#cd", "of another program", "far#ef"):
        ray.add_group(name)
    ray.add_group("old#gh", "REMOVED")
    ray.actors = {"m/0#ab": Actor()}
    ray.others = {"far#ef"}
    sweep_places()
    assert ray.removed == ["m/1#cd"]


@pytest.mark.parametrize(("label", "name"), [("m/0#ab", "m/0"), ("a#b/0#cd", "a#b/0")])
def test_the_name_of_a_process_is_that_of_its_place_without_the_end(label: str, name: str) -> None:
    assert name_of(label) == name
