"""Adapters come and go while workers refuse them, die and come back: never on some of them only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.protocol.adapters import AdapterInfo, AdapterSpec
from servekit.supervisor.adapters.rollout import Adapters
from servekit.supervisor.adapters.state import Later, Outcome, Refusal
from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.workers.worker_process import WorkerProcess

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
    def held_adapters(self) -> dict[str, AdapterInfo]:
        return self.held

    async def ask_to_load(self, adapter: AdapterSpec) -> Outcome:
        if not self.alive:
            return Refusal("dead", died=True, left=True)
        assert adapter.name not in self.held, "it has that one"
        outcome: Outcome = await self._told(adapter.name)
        if isinstance(outcome, AdapterInfo):
            self.held[adapter.name] = outcome
        return outcome

    async def ask_to_unload(self, name: str) -> bool:
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


class FakeDeployment:
    """Some fake workers, and the adapters of their model."""

    drain_timeout_s = 1.0

    def __init__(self, *file: AdapterSpec, is_away: bool = False) -> None:
        self.is_away = is_away  # if none of them serves
        self.fakes = [Fake(f"m/{index}") for index in range(WORKERS)]
        self.adapters = Adapters("m", file, cast(Deployment, self))
        self.tasks: list[asyncio.Task[Any]] = []

    def workers(self, adapters: Adapters) -> Sequence[Fake]:
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

        if await self.adapters.join(cast(WorkerProcess, worker), {}, admit):
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


def do(deployment: FakeDeployment, deed: tuple[Any, ...]) -> None:
    match deed:
        case ("add", name, in_place):
            deployment.do(deployment.adapters.add_adapter(spec(name), in_place=in_place))
        case ("remove", name):
            deployment.do(deployment.adapters.remove_adapter(name))
        case ("answer", index, well):
            deployment.fakes[index].answer(well=well)
        case ("die", index):
            deployment.fakes[index].die()
        case ("start", index):
            deployment.start(deployment.fakes[index])
        case ("keep", names):
            deployment.adapters.adopt_added([spec(name) for name in sorted(names)])
        case ("follow", names):
            deployment.adapters.follow_file([spec(name, "/file") for name in sorted(names)], names)


@given(st.lists(DEEDS, max_size=40), st.sets(st.sampled_from(NAMES)))
@settings(max_examples=150, deadline=None)
def test_never_half_loaded_and_always_decided(deeds: list[tuple[Any, ...]], file: set[str]) -> None:
    async def play() -> None:
        deployment = FakeDeployment(*(spec(name, "/file") for name in sorted(file)))
        for worker in deployment.fakes:
            deployment.start(worker)
        for deed in deeds:
            do(deployment, deed)
            await deployment.settle()
        await deployment.finish()
        deployment.tasks.append(
            asyncio.get_running_loop().create_task(deployment.adapters.remove_adapter("none"))
        )
        await deployment.finish()  # whatever the file asked for had its turn before
        for worker in deployment.fakes:
            deployment.start(worker)
        await deployment.finish()
        for worker in deployment.fakes:
            if worker.serves:
                assert set(worker.held) == deployment.serving(), worker.name
        assert {entry.state for entry in deployment.adapters.book} <= {
            "serving",
            "failed",
            "loading",
        }
        if any(worker.serves for worker in deployment.fakes):
            assert {entry.state for entry in deployment.adapters.book} <= {"serving", "failed"}

    asyncio.run(play())


async def up(*file: AdapterSpec) -> FakeDeployment:
    deployment = FakeDeployment(*file)
    for worker in deployment.fakes:
        deployment.start(worker)
    await deployment.finish()
    return deployment


def asked(deployment: FakeDeployment) -> list[str]:
    return [name for worker in deployment.fakes for name, _ in worker.orders]


async def test_one_refuses_and_the_others_unload() -> None:
    deployment = await up()
    adding = deployment.do(deployment.adapters.add_adapter(spec("x")))
    await deployment.settle()
    first, second, third = deployment.fakes
    for worker, well in ((first, True), (third, False)):
        worker.answer(well=well)
    await deployment.settle()
    assert not adding.done()  # the second has not said
    second.answer(well=True)
    await deployment.settle()
    assert asked(deployment) == ["", ""]  # unload
    await deployment.finish()
    assert adding.result() == Refusal("m/2 refuses x", invalid=True)
    assert not any(worker.held for worker in deployment.fakes)
    assert not list(deployment.adapters.book)


async def test_what_is_loaded_already_is_refused_unless_in_place() -> None:
    deployment = await up()
    deployment.do(deployment.adapters.add_adapter(spec("x")))
    again = deployment.do(deployment.adapters.add_adapter(spec("x")))
    other = deployment.do(deployment.adapters.add_adapter(spec("x", "/b"), in_place=True))
    await deployment.finish()
    assert isinstance(again.result(), Refusal)
    assert again.result().invalid
    assert "set 'load_inplace' to True" in again.result().message
    assert isinstance(other.result(), AdapterInfo)
    assert deployment.adapters.expected() == (spec("x", "/b"),)


async def exchange() -> tuple[FakeDeployment, asyncio.Task[Any]]:
    """An adapter that is exchanged in place: its workers have unloaded it."""
    deployment = await up()
    deployment.do(deployment.adapters.add_adapter(spec("x")))
    await deployment.finish()
    other = deployment.do(deployment.adapters.add_adapter(spec("x", "/b"), in_place=True))
    await deployment.settle()
    for worker in deployment.fakes:
        worker.answer(well=True)  # unloads
    await deployment.settle()
    return deployment, other


async def test_in_place_and_refused_is_back_to_what_was() -> None:
    deployment, other = await exchange()
    deployment.fakes[1].answer(well=False)
    await deployment.finish()
    assert isinstance(other.result(), Refusal)
    assert deployment.adapters.expected() == (spec("x"),)
    assert all("x" in worker.held for worker in deployment.fakes)


async def test_in_place_and_all_died_is_back_to_what_was_once_they_are_up_again() -> None:
    deployment, other = await exchange()
    for worker in deployment.fakes:
        worker.die()
    await deployment.finish()
    assert other.result() == Refusal("m/0 died", died=True)
    for worker in deployment.fakes:
        deployment.start(worker)
    await deployment.finish()
    assert deployment.adapters.expected() == (spec("x"),)
    assert all("x" in worker.held for worker in deployment.fakes)


async def test_the_files_is_changed_in_the_file_only() -> None:
    deployment = await up(spec("x"))
    other = deployment.do(deployment.adapters.add_adapter(spec("x", "/b"), in_place=True))
    await deployment.finish()
    assert "change it there, and reload" in other.result().message


async def test_a_worker_that_cannot_have_what_others_serve_does_not_serve() -> None:
    deployment = await up(spec("x"))
    last = deployment.fakes[2]
    last.die()
    deployment.start(last)
    await deployment.settle()
    last.answer(well=False)
    await deployment.settle()
    assert not last.alive
    assert deployment.serving() == {"x"}


async def test_where_none_can_have_it_the_base_is_served_without() -> None:
    deployment = await up(spec("x"), spec("y"))
    for worker in deployment.fakes:
        worker.die()
    deployment.start(deployment.fakes[0])
    await deployment.settle()
    deployment.fakes[0].answer(well=False)
    await deployment.finish()
    assert deployment.fakes[0].serves
    assert deployment.serving() == {"y"}
    failed = deployment.adapters.book.get("x")
    assert failed is not None
    assert (failed.state, failed.reason) == ("failed", "m/0 refuses x")


async def test_one_that_comes_up_meanwhile_waits_for_the_decision() -> None:
    deployment = await up()
    late = deployment.fakes[2]
    late.die()
    deployment.do(deployment.adapters.add_adapter(spec("x")))
    await deployment.settle()
    deployment.start(late)
    await deployment.settle()
    assert not late.orders
    for worker in deployment.fakes[:2]:
        worker.answer(well=True)
    await deployment.settle()
    assert not late.serves
    assert asked(deployment) == ["x"]  # it is brought up to date
    late.answer(well=True)
    await deployment.settle()
    assert late.serves


async def test_the_next_version_has_what_was_added_unless_the_file_claims_its_name() -> None:
    deployment = await up(spec("x"))
    for name in ("y", "z"):
        deployment.do(deployment.adapters.add_adapter(spec(name)))
    await deployment.finish()
    after = deployment.adapters.make_successor([spec("new")], {"new", "z"})
    assert after.expected() == (spec("new"), spec("y"))


async def test_what_was_added_before_us_is_kept_and_had_by_all() -> None:
    deployment = FakeDeployment(spec("x"))
    early, adopted, _ = deployment.fakes
    deployment.start(early)
    await deployment.finish()
    adopted.held = {name: info(name) for name in ("x", "y", "w")}
    deployment.adapters.follow_file([spec("x")], {"x", "b"})
    await deployment.settle()
    deployment.adapters.adopt_added(
        [spec("x", "/other"), spec("y"), spec("b")]
    )  # "b" is another model now
    deployment.start(adopted)
    await deployment.finish()
    assert set(early.held) == set(adopted.held) == {"x", "y"}
    assert deployment.adapters.expected() == (spec("x"), spec("y"))
    assert deployment.adapters.added == (spec("y"),)


@pytest.mark.parametrize("unused", [True, False])
async def test_it_is_unloaded_once_gateways_have_no_request_for_it(
    unused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = await up(spec("x"))
    is_unused: list[bool] = [unused]
    ask: Callable[[str], bool] = lambda name: is_unused[0]  # noqa: E731
    monkeypatch.setattr(deployment, "is_unused", ask)
    deployment.do(deployment.adapters.remove_adapter("x"))
    await deployment.settle()
    assert asked(deployment) == ([""] * WORKERS if unused else [])
    is_unused[0] = True
    await deployment.finish()
    assert not any(worker.held for worker in deployment.fakes)


async def test_what_is_added_to_a_model_that_is_away_comes_with_it() -> None:
    deployment = FakeDeployment(is_away=True)
    adding = deployment.do(deployment.adapters.add_adapter(spec("x")))
    again = deployment.do(deployment.adapters.add_adapter(spec("x")))
    await deployment.finish()
    assert adding.result() == Later()
    assert "already been loaded" in again.result().message
    assert deployment.adapters.expected() == (spec("x"),)
    deployment.start(deployment.fakes[0])
    await deployment.settle()
    assert asked(deployment) == ["x"]
    await deployment.finish()
    assert deployment.serving() == {"x"}
    assert (deployment.fakes[0].serves, set(deployment.fakes[0].held)) == (True, {"x"})


async def test_what_is_added_to_a_model_that_is_away_and_then_refused_has_failed() -> None:
    deployment = FakeDeployment(is_away=True)
    deployment.do(deployment.adapters.add_adapter(spec("x")))
    await deployment.finish()
    deployment.start(deployment.fakes[0])
    await deployment.settle()
    deployment.fakes[0].answer(well=False)
    await deployment.finish()
    (entry,) = deployment.adapters.book
    assert (entry.state, entry.reason) == ("failed", "m/0 refuses x")
    assert deployment.fakes[0].serves


@pytest.mark.parametrize("removed", [True, False])
async def test_one_that_wakes_has_no_other_than_is_meant_now(removed: bool) -> None:
    deployment = await up(spec("y"))
    deployment.is_away = True
    deployment.do(deployment.adapters.add_adapter(spec("x")))
    await deployment.finish()
    for worker in deployment.fakes:
        worker.serves = False  # they sleep, with all that they have
    if removed:
        deployment.do(deployment.adapters.remove_adapter("x"))
    deployment.do(deployment.adapters.add_adapter(spec("x", "/b"), in_place=True))
    await deployment.finish()
    assert deployment.adapters.expected() == (spec("y"), spec("x", "/b"))
    for worker in deployment.fakes:
        deployment.do(deployment._come_up(worker))
    await deployment.settle()
    assert asked(deployment) == [""], "the old one is unloaded first"
    deployment.fakes[0].answer(well=True)
    await deployment.settle()
    assert asked(deployment) == ["x"]
    await deployment.finish()
    assert all(worker.serves for worker in deployment.fakes)


async def test_one_that_falls_asleep_meanwhile_gets_no_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deployment = await up()
    deployment.do(deployment.adapters.add_adapter(spec("x")))
    await deployment.finish()
    is_unused: list[bool] = [False]
    ask: Callable[[str], bool] = lambda name: is_unused[0]  # noqa: E731
    monkeypatch.setattr(deployment, "is_unused", ask)
    adding = deployment.do(deployment.adapters.add_adapter(spec("x", "/b"), in_place=True))
    await deployment.settle()
    for worker in deployment.fakes:
        worker.serves = False
    deployment.is_away = is_unused[0] = True
    await deployment.finish()
    assert adding.result() == Later()
    for worker in deployment.fakes:
        assert set(worker.held) == {"x"}, "it sleeps with what it has"
        deployment.do(deployment._come_up(worker))
    await deployment.settle()
    assert asked(deployment) == [""], "the old one is unloaded first"
    await deployment.finish()
    assert deployment.adapters.expected() == (spec("x", "/b"),)
    assert all(worker.serves for worker in deployment.fakes)


async def test_the_next_version_has_what_was_added_to_one_that_was_away() -> None:
    deployment = FakeDeployment(is_away=True)
    deployment.do(deployment.adapters.add_adapter(spec("x")))
    await deployment.finish()
    assert deployment.adapters.make_successor((), ()).expected() == (spec("x"),)
    assert deployment.adapters.make_successor((), {"x"}).expected() == ()
