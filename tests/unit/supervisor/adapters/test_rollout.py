"""Adapters come and go while workers refuse them, die and come back: never on some of them only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.supervisor.adapters.rollout import Adapters, Worker
from servekit.supervisor.adapters.state import Later, Outcome, Refusal

DEADLINE_S = 60.0
NAMES = ("x", "y", "z")
WORKERS = 3


def spec(name: str, path: str = "/a") -> AdapterSpec:
    return AdapterSpec(name, path)


def info(name: str) -> AdapterInfo:
    return AdapterInfo(name, "LORA", "mixed", "because")


class Fake:
    """A worker whose answers come when the test says so, and as it says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.serves = False
        self.alive = False
        self.held: dict[str, AdapterInfo] = {}
        self.orders: list[tuple[str, asyncio.Future[Any]]] = []  # what was told, unanswered

    @property
    def holds(self) -> dict[str, AdapterInfo]:
        return self.held

    async def load_adapter(self, adapter: AdapterSpec) -> Outcome:
        if not self.alive:
            return Refusal("dead", died=True, left=True)
        assert adapter.name not in self.held, "it has that one"
        outcome: Outcome = await self._told(adapter.name)
        if isinstance(outcome, AdapterInfo):
            self.held[adapter.name] = outcome
        return outcome

    async def unload_adapter(self, name: str) -> bool:
        if not self.alive:
            return False
        assert name in self.held
        outcome = await self._told("")
        self.held.pop(name, None)
        return not isinstance(outcome, Refusal)

    async def _told(self, what: str) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.orders.append((what, answer))
        return await answer

    def answer(self, *, well: bool) -> None:
        """Answer the oldest order. Only loads can be refused."""
        if self.orders:
            name, answer = self.orders.pop(0)
            refused = Refusal(f"{self.name} refuses {name}", invalid=True)
            answer.set_result(info(name) if well or not name else refused)

    def die(self) -> None:
        self.alive = self.serves = False
        self.held = {}
        orders, self.orders = self.orders, []
        for _, answer in orders:
            answer.set_result(Refusal(f"{self.name} died", died=True))


class Fleet:
    """Some fake workers, and the adapters of their model."""

    drain_timeout_s = 1.0

    def __init__(self, *file: AdapterSpec, is_away: bool = False) -> None:
        self.is_away = is_away  # if none of them serves
        self.fakes = [Fake(f"m/{index}") for index in range(WORKERS)]
        self.adapters = Adapters("m", file, self)
        self.tasks: list[asyncio.Task[Any]] = []

    def workers(self, adapters: Adapters) -> Sequence[Worker]:
        return self.fakes

    def changed(self) -> None:
        pass

    def is_unused(self, adapter: str) -> bool:
        return True

    def do(self, work: Any) -> asyncio.Task[Any]:
        self.tasks.append(task := asyncio.get_running_loop().create_task(work))
        return task

    def start(self, worker: Fake) -> None:
        """It comes up with nothing loaded, as one that is wary."""
        if not worker.alive:
            worker.alive = True
            self.do(self._come_up(worker))

    async def _come_up(self, worker: Fake) -> None:
        def admit() -> None:
            worker.serves = worker.alive

        if await self.adapters.join(worker, {}, admit):
            worker.die()

    async def settle(self) -> None:
        """Let all that can happen without an answer happen."""
        for _ in range(30):
            await asyncio.sleep(0)
        self.check()

    def check(self) -> None:
        """What is said to serve is on each worker that serves."""
        serving = [worker.held for worker in self.fakes if worker.serves]
        for status in self.adapters.statuses(serving):
            if status.state == "serving":
                assert all(status.name in held for held in serving), status

    async def finish(self) -> None:
        """Answer everything well until nobody waits."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(task.done() for task in self.tasks):
                for worker in self.fakes:
                    worker.answer(well=True)
                await self.settle()
        for task in self.tasks:
            task.result()

    def serving(self) -> set[str]:
        return {entry.spec.name for entry in self.adapters.book if entry.state == "serving"}


DEEDS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    st.tuples(st.just("answer"), st.integers(0, WORKERS - 1), st.booleans()),
    st.tuples(st.just("die"), st.integers(0, WORKERS - 1)),
    st.tuples(st.just("start"), st.integers(0, WORKERS - 1)),
    st.tuples(st.just("keep"), st.sets(st.sampled_from(NAMES))),
    st.tuples(st.just("follow"), st.sets(st.sampled_from(NAMES))),
)


def do(fleet: Fleet, deed: tuple[Any, ...]) -> None:
    match deed:
        case ("add", name, in_place):
            fleet.do(fleet.adapters.add(spec(name), in_place=in_place))
        case ("remove", name):
            fleet.do(fleet.adapters.remove(name))
        case ("answer", index, well):
            fleet.fakes[index].answer(well=well)
        case ("die", index):
            fleet.fakes[index].die()
        case ("start", index):
            fleet.start(fleet.fakes[index])
        case ("keep", names):
            fleet.adapters.keep([spec(name) for name in sorted(names)])
        case ("follow", names):
            fleet.adapters.follow([spec(name, "/file") for name in sorted(names)], names)


@given(st.lists(DEEDS, max_size=40), st.sets(st.sampled_from(NAMES)))
@settings(max_examples=150, deadline=None)
def test_never_half_loaded_and_always_decided(deeds: list[tuple[Any, ...]], file: set[str]) -> None:
    async def play() -> None:
        fleet = Fleet(*(spec(name, "/file") for name in sorted(file)))
        for worker in fleet.fakes:
            fleet.start(worker)
        for deed in deeds:
            do(fleet, deed)
            await fleet.settle()
        await fleet.finish()
        fleet.tasks.append(asyncio.get_running_loop().create_task(fleet.adapters.remove("none")))
        await fleet.finish()  # whatever the file asked for had its turn before
        for worker in fleet.fakes:
            fleet.start(worker)
        await fleet.finish()
        for worker in fleet.fakes:
            if worker.serves:
                assert set(worker.held) == fleet.serving(), worker.name
        assert {entry.state for entry in fleet.adapters.book} <= {"serving", "failed", "loading"}
        if any(worker.serves for worker in fleet.fakes):
            assert {entry.state for entry in fleet.adapters.book} <= {"serving", "failed"}

    asyncio.run(play())


async def up(*file: AdapterSpec) -> Fleet:
    fleet = Fleet(*file)
    for worker in fleet.fakes:
        fleet.start(worker)
    await fleet.finish()
    return fleet


def asked(fleet: Fleet) -> list[str]:
    return [name for worker in fleet.fakes for name, _ in worker.orders]


async def test_one_refuses_and_the_others_unload() -> None:
    fleet = await up()
    adding = fleet.do(fleet.adapters.add(spec("x")))
    await fleet.settle()
    first, second, third = fleet.fakes
    for worker, well in ((first, True), (third, False)):
        worker.answer(well=well)
    await fleet.settle()
    assert not adding.done()  # the second has not said
    second.answer(well=True)
    await fleet.settle()
    assert asked(fleet) == ["", ""]  # unload
    await fleet.finish()
    assert adding.result() == Refusal("m/2 refuses x", invalid=True)
    assert not any(worker.held for worker in fleet.fakes)
    assert not list(fleet.adapters.book)


async def test_what_is_loaded_already_is_refused_unless_in_place() -> None:
    fleet = await up()
    fleet.do(fleet.adapters.add(spec("x")))
    again = fleet.do(fleet.adapters.add(spec("x")))
    other = fleet.do(fleet.adapters.add(spec("x", "/b"), in_place=True))
    await fleet.finish()
    assert isinstance(again.result(), Refusal)
    assert again.result().invalid
    assert "set 'load_inplace' to True" in again.result().message
    assert isinstance(other.result(), AdapterInfo)
    assert fleet.adapters.expected() == (spec("x", "/b"),)


async def test_in_place_and_refused_is_back_to_what_was() -> None:
    fleet = await up()
    fleet.do(fleet.adapters.add(spec("x")))
    await fleet.finish()
    other = fleet.do(fleet.adapters.add(spec("x", "/b"), in_place=True))
    await fleet.settle()
    for worker in fleet.fakes:
        worker.answer(well=True)  # unloads
    await fleet.settle()
    fleet.fakes[1].answer(well=False)
    await fleet.finish()
    assert isinstance(other.result(), Refusal)
    assert fleet.adapters.expected() == (spec("x"),)
    assert all("x" in worker.held for worker in fleet.fakes)


async def test_the_files_is_changed_in_the_file_only() -> None:
    fleet = await up(spec("x"))
    other = fleet.do(fleet.adapters.add(spec("x", "/b"), in_place=True))
    await fleet.finish()
    assert "change it there, and reload" in other.result().message


async def test_a_worker_that_cannot_have_what_others_serve_does_not_serve() -> None:
    fleet = await up(spec("x"))
    last = fleet.fakes[2]
    last.die()
    fleet.start(last)
    await fleet.settle()
    last.answer(well=False)
    await fleet.settle()
    assert not last.alive
    assert fleet.serving() == {"x"}


async def test_where_none_can_have_it_the_base_is_served_without() -> None:
    fleet = await up(spec("x"), spec("y"))
    for worker in fleet.fakes:
        worker.die()
    fleet.start(fleet.fakes[0])
    await fleet.settle()
    fleet.fakes[0].answer(well=False)
    await fleet.finish()
    assert fleet.fakes[0].serves
    assert fleet.serving() == {"y"}
    failed = fleet.adapters.book.get("x")
    assert failed is not None
    assert (failed.state, failed.reason) == ("failed", "m/0 refuses x")


async def test_one_that_comes_up_meanwhile_waits_for_the_decision() -> None:
    fleet = await up()
    late = fleet.fakes[2]
    late.die()
    fleet.do(fleet.adapters.add(spec("x")))
    await fleet.settle()
    fleet.start(late)
    await fleet.settle()
    assert not late.orders
    for worker in fleet.fakes[:2]:
        worker.answer(well=True)
    await fleet.settle()
    assert not late.serves
    assert asked(fleet) == ["x"]  # it is brought up to date
    late.answer(well=True)
    await fleet.settle()
    assert late.serves


async def test_the_next_version_has_what_was_added_unless_the_file_claims_its_name() -> None:
    fleet = await up(spec("x"))
    for name in ("y", "z"):
        fleet.do(fleet.adapters.add(spec(name)))
    await fleet.finish()
    after = fleet.adapters.successor([spec("new")], {"new", "z"})
    assert after.expected() == (spec("new"), spec("y"))


async def test_what_was_added_before_us_is_kept_and_had_by_all() -> None:
    fleet = Fleet(spec("x"))
    early, adopted, _ = fleet.fakes
    fleet.start(early)
    await fleet.finish()
    adopted.held = {name: info(name) for name in ("x", "y", "w")}
    fleet.adapters.follow([spec("x")], {"x", "b"})
    await fleet.settle()
    fleet.adapters.keep([spec("x", "/other"), spec("y"), spec("b")])  # "b" is another model now
    fleet.start(adopted)
    await fleet.finish()
    assert set(early.held) == set(adopted.held) == {"x", "y"}
    assert fleet.adapters.expected() == (spec("x"), spec("y"))
    assert fleet.adapters.added == (spec("y"),)


@pytest.mark.parametrize("unused", [True, False])
async def test_it_is_unloaded_once_gateways_have_no_request_for_it(
    unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await up(spec("x"))
    is_unused: list[bool] = [unused]
    ask: Callable[[str], bool] = lambda name: is_unused[0]  # noqa: E731
    monkeypatch.setattr(fleet, "is_unused", ask)
    fleet.do(fleet.adapters.remove("x"))
    await fleet.settle()
    assert asked(fleet) == ([""] * WORKERS if unused else [])
    is_unused[0] = True
    await fleet.finish()
    assert not any(worker.held for worker in fleet.fakes)


async def test_what_is_added_to_a_model_that_is_away_comes_with_it() -> None:
    fleet = Fleet(is_away=True)
    adding = fleet.do(fleet.adapters.add(spec("x")))
    again = fleet.do(fleet.adapters.add(spec("x")))
    await fleet.finish()
    assert adding.result() == Later()
    assert "already been loaded" in again.result().message
    assert fleet.adapters.expected() == (spec("x"),)
    fleet.start(fleet.fakes[0])
    await fleet.settle()
    assert asked(fleet) == ["x"]
    await fleet.finish()
    assert fleet.serving() == {"x"}
    assert (fleet.fakes[0].serves, set(fleet.fakes[0].held)) == (True, {"x"})


async def test_what_is_added_to_a_model_that_is_away_and_then_refused_has_failed() -> None:
    fleet = Fleet(is_away=True)
    fleet.do(fleet.adapters.add(spec("x")))
    await fleet.finish()
    fleet.start(fleet.fakes[0])
    await fleet.settle()
    fleet.fakes[0].answer(well=False)
    await fleet.finish()
    (entry,) = fleet.adapters.book
    assert (entry.state, entry.reason) == ("failed", "m/0 refuses x")
    assert fleet.fakes[0].serves


@pytest.mark.parametrize("removed", [True, False])
async def test_one_that_wakes_has_no_other_than_is_meant_now(removed: bool) -> None:
    fleet = await up(spec("y"))
    fleet.is_away = True
    fleet.do(fleet.adapters.add(spec("x")))
    await fleet.finish()
    for worker in fleet.fakes:
        worker.serves = False  # they sleep, with all that they have
    if removed:
        fleet.do(fleet.adapters.remove("x"))
    fleet.do(fleet.adapters.add(spec("x", "/b"), in_place=True))
    await fleet.finish()
    assert fleet.adapters.expected() == (spec("y"), spec("x", "/b"))
    for worker in fleet.fakes:
        fleet.do(fleet._come_up(worker))
    await fleet.settle()
    assert asked(fleet) == [""], "the old one is unloaded first"
    fleet.fakes[0].answer(well=True)
    await fleet.settle()
    assert asked(fleet) == ["x"]
    await fleet.finish()
    assert all(worker.serves for worker in fleet.fakes)


async def test_the_next_version_has_what_was_added_to_one_that_was_away() -> None:
    fleet = Fleet(is_away=True)
    fleet.do(fleet.adapters.add(spec("x")))
    await fleet.finish()
    assert fleet.adapters.successor((), ()).expected() == (spec("x"),)
    assert fleet.adapters.successor((), {"x"}).expected() == ()
