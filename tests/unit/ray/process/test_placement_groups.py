"""Room for a worker: the groups that Ray is asked for, waited for and given back.

There is no Ray here: groups and nodes are made up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("ray")

from servekit.protocol.control.ray_messages import PlaceWorker
from servekit.ray.process import placement_groups as module
from servekit.ray.process.placement_groups import make_place, place_name
from tests.polling import poll_async

ORDER = PlaceWorker(1, "m/0", "m", 2, 1.5, "PACK", "print")


class Group:
    """A group that Ray has been asked for; `room` is whether its place is there."""

    def __init__(self, ray: Ray, asked: dict[str, Any]) -> None:
        self.ray, self.asked = ray, asked

    def wait(self, seconds: float) -> bool:
        assert seconds == 0
        return self.ray.room


class Ray:
    """Whatever this module asks of Ray, and the checks of its nodes."""

    def __init__(self) -> None:
        self.room = True
        self.made: list[Group] = []
        self.removed: list[Group] = []
        self.node = "n1"  # where a group comes to be
        self.faults: list[dict[str, str]] = []  # of each check in turn; the last stays
        self.checked: list[str] = []
        self.aimed: list[dict[str, str]] = []
        self.waits: list[str] = []
        self.error: Exception | None = None

    def placement_group(self, bundles: list[Any], strategy: str, **how: Any) -> Group:
        if self.error is not None:
            raise self.error
        self.made.append(Group(self, {"bundles": bundles, "strategy": strategy, **how}))
        return self.made[-1]

    def table(self, group: Group) -> dict[str, Any]:
        return {"bundles_to_node_id": {0: self.node}} if self.node else {}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "n1", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}}]

    async def faults_of(self, order: PlaceWorker, of: str = "") -> dict[str, str]:
        self.checked.append(of)
        if not self.faults:
            return {}
        return self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]

    async def aim(self, faults: Mapping[str, str]) -> str:
        self.aimed.append(dict(faults))
        return "n1"

    async def make(self, order: PlaceWorker = ORDER) -> tuple[str, Any]:
        checks: Any = type("Checks", (), {"faults": staticmethod(self.faults_of)})
        return await make_place(order, checks, self.aim, self.waits.append)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    made = Ray()
    monkeypatch.setattr(module, "placement_group", made.placement_group)
    monkeypatch.setattr(module, "remove_placement_group", made.removed.append)
    monkeypatch.setattr(module, "placement_group_table", made.table)
    monkeypatch.setattr("ray.nodes", made.nodes)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    yield made


def test_no_two_places_have_one_name() -> None:
    first, second = place_name(ORDER), place_name(ORDER)
    assert first.startswith("m/0#") and first != second


async def test_a_place_is_one_bundle_on_the_node_that_is_aimed_at(ray: Ray) -> None:
    label, group = await ray.make()
    assert ray.made == [group] and ray.removed == []
    assert group.asked == {
        "bundles": [{"CPU": 1.5, "GPU": 2.0}],
        "strategy": "STRICT_PACK",
        "name": label,
        "lifetime": "detached",
        "_soft_target_node_id": "n1",
        "bundle_label_selector": None,
    }
    assert ray.checked == ["", "n1"] and ray.waits == [""]


async def test_a_worker_on_the_cpu_asks_for_no_gpu(ray: Ray) -> None:
    _, group = await ray.make(replace(ORDER, gpus=0))
    assert group.asked["bundles"] == [{"CPU": 1.5}]


async def test_nodes_that_cannot_run_it_are_left_out(ray: Ray) -> None:
    ray.faults = [{"n3": "it is old", "n2": "it lacks files"}, {}]
    _, group = await ray.make()
    assert ray.aimed == [{"n3": "it is old", "n2": "it lacks files"}]
    assert group.asked["bundle_label_selector"] == [{"ray.io/node-id": "!in(n2,n3)"}]


async def test_a_group_on_a_node_that_fails_its_check_is_given_back(ray: Ray) -> None:
    ray.faults = [{}, {"n1": "it is old"}, {"n1": "it is old"}, {}]
    _, group = await ray.make()
    assert len(ray.made) == 2 and ray.removed == ray.made[:1] and group is ray.made[1]
    assert ray.aimed == [{}, {"n1": "it is old"}]


async def test_a_node_that_is_lost_already_is_no_reason_to_ask_another(ray: Ray) -> None:
    ray.node = ""
    await ray.make()
    assert ray.checked == ["", ""]


async def test_what_it_waits_for_is_told_once(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(module, "_SAY_S", 0.0)
    ray.room = False
    making = asyncio.create_task(ray.make())
    await poll_async("it is told", lambda: ray.waits)
    asked = len(ray.made)
    ray.room = True
    await making
    assert ray.waits == ["waits for 2 GPUs in the Ray cluster", ""]
    assert asked == len(ray.made) == 1


async def test_nothing_is_told_where_there_is_room_at_once(ray: Ray) -> None:
    ray.room = False
    making = asyncio.create_task(ray.make())
    await poll_async("it is asked for", lambda: ray.made)
    ray.room = True
    await making
    assert ray.waits == [""]


async def test_failed_nodes_are_checked_again_while_it_waits(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    ray.room = False
    ray.faults = [{"n2": "it is old"}, {"n2": "it is old"}, {}]
    making = asyncio.create_task(ray.make())
    await poll_async("all are asked again", lambda: len(ray.aimed) == 3)
    assert ray.removed == ray.made[:2], "the groups before are given back"
    assert ray.aimed[-1] == {}
    assert not making.done(), "without failed nodes it waits on"
    ray.room = True
    _, group = await making
    assert group is ray.made[2]


async def test_one_that_is_not_wanted_any_more_gives_its_group_back(ray: Ray) -> None:
    ray.room = False
    making = asyncio.create_task(ray.make())
    await poll_async("it is asked for", lambda: ray.made)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert ray.removed == ray.made


async def test_an_error_of_ray_is_raised(ray: Ray) -> None:
    ray.error = ValueError("no such label")
    with pytest.raises(ValueError, match="no such label"):
        await ray.make()
    assert ray.removed == []
