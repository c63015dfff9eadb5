"""One connection to one worker, over a real socket; the worker says what the test has it say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from servekit.errors import ContextLengthExceeded, RequestError
from servekit.gateway.routing import worker_connection
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.gateway.routing.worker_connection import NEARBY, WorkerConnection
from servekit.protocol.messages import (
    PROOF_TOKENS,
    PROTOCOL,
    Borrow,
    Cancel,
    Cancelled,
    Continuation,
    Delta,
    DeltaBatch,
    Failed,
    GatewayToWorker,
    Generate,
    Hello,
    IsolationEnded,
    IsolationStarted,
    Lent,
    ModelInfo,
    ReplicaStatus,
    SamplingParams,
)
from servekit.protocol.transport.connection import Connection, listen_at
from tests.unit.gateway.conftest import until

SLOTS = 4


class Owner:
    """What a connection tells its router."""

    reach = NEARBY
    name = "gateway/0"

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.larger = False
        self.lost = (True, True, True)

    def has_larger(self, replica: WorkerConnection, call: InflightRequest) -> bool:
        return self.larger

    def on_lost(self, replica: WorkerConnection, calls: list[InflightRequest]) -> None:
        self.lost = (replica.borrows, replica.has_room, replica.routable)
        self.told.append(("lost", calls))

    def on_free(self, replica: WorkerConnection) -> None:
        self.told.append(("free", replica.credits))

    def on_returned(self, replica: WorkerConnection, call: InflightRequest) -> None:
        self.told.append(("returned", call))

    def on_changed(self, replica: WorkerConnection, call: InflightRequest) -> None:
        self.told.append(("changed", call))

    def on_ended(self, call: InflightRequest) -> None:
        self.told.append(("ended", call))


class Scene:
    """The connection and the worker at its other end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.owner = Owner()
        self.heard: list[GatewayToWorker] = []
        self.peers: list[Connection[GatewayToWorker]] = []
        self.closed = 0
        self.info = ModelInfo(100, SLOTS, True, "echo", "none", "cpu", generation="g1")

    async def listen(self) -> None:
        self.server = await listen_at(self.path, self._connect)

    def _connect(self) -> Connection[GatewayToWorker]:
        peer: Connection[GatewayToWorker] = Connection(
            GatewayToWorker, lambda message: self._hear(peer, message), self._on_close
        )
        self.peers.append(peer)
        return peer

    def _hear(self, peer: Connection[GatewayToWorker], message: GatewayToWorker) -> None:
        if isinstance(message, Hello):
            peer.send(Hello(PROTOCOL, "worker", "m/0", self.info))
        self.heard.append(message)

    def _on_close(self, error: Exception | None) -> None:
        self.closed += 1

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.peers[-1].send(message)

    def dial(self, share: int = 1) -> WorkerConnection:
        status = ReplicaStatus("m/0", "ready", str(self.path), 1, "cpu")
        self.worker = WorkerConnection(cast(Router, self.owner), "m", status, share)
        return self.worker

    async def connect(self, share: int = 1) -> WorkerConnection:
        await self.listen()
        self.dial(share)
        await until(lambda: self.worker.routable, "it is connected")
        return self.worker

    async def run(self, *calls: InflightRequest) -> None:
        """Send calls, and wait until the worker has them."""
        for call in calls:
            self.worker.send_call(call)
            call.wire_id = self.worker.last_id
        sent = [call.wire_id for call in calls]
        have: Callable[[], bool] = lambda: {*sent} <= {one.id for one in self.generates}  # noqa: E731
        await until(have, "the worker has it")

    @property
    def generates(self) -> list[Generate]:
        return [one for one in self.heard if isinstance(one, Generate)]

    def told(self, kind: str) -> list[Any]:
        return [what for named, what in self.owner.told if named == kind]


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path / "w.sock")
    yield scene
    scene.worker.retire()
    for peer in scene.peers:
        peer.close()
    scene.server.close()


def ask(**fields: Any) -> InflightRequest:
    call = InflightRequest("m", SamplingParams(max_tokens=5), prompt="abc")
    for name, value in fields.items():
        setattr(call, name, value)
    return call


def begun(generation: str = "g1") -> Continuation:
    return Continuation(generation, 5)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# ---------------------------------------------------------------- connect


async def test_nothing_is_sent_to_a_worker_before_its_hello(scene: Scene) -> None:
    await scene.listen()
    worker = scene.dial()
    assert (worker.routable, worker.credits, worker.has_room) == (False, 0, False)
    assert not worker.can_run(ask())
    await until(lambda: worker.routable, "it is connected")
    assert scene.heard == [Hello(PROTOCOL, "gateway", "gateway/0")]
    assert (worker.credits, worker.has_room) == (SLOTS, True)
    assert worker.can_run(ask()) and worker.has_slot_for(ask())
    assert scene.told("free") == [SLOTS], "what waits may go now"


async def test_it_dials_until_the_worker_listens(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_connection, "REDIAL_S", 0.001)
    worker = scene.dial()
    await settle()
    assert not worker.routable
    await scene.listen()
    await until(lambda: worker.routable, "it is connected")


async def test_a_worker_that_hangs_up_at_once_is_not_dialled_without_a_pause(scene: Scene) -> None:
    dialled_s: list[float] = []

    def hang_up() -> Connection[GatewayToWorker]:
        dialled_s.append(asyncio.get_running_loop().time())
        peer: Connection[GatewayToWorker] = Connection(
            GatewayToWorker, lambda message: peer.abort(), lambda error: None
        )
        return peer

    scene.server = await listen_at(scene.path, hang_up)
    scene.dial()
    await until(lambda: len(dialled_s) > 3, "it tries again")
    assert dialled_s[3] - dialled_s[0] >= 2 * worker_connection.REDIAL_S


@pytest.mark.parametrize(("share", "own"), [(1, 4), (2, 2), (3, 1), (9, 1)])
async def test_gateways_share_the_slots(scene: Scene, share: int, own: int) -> None:
    worker = await scene.connect(share)
    assert worker.credits == own
    worker.set_share(1)
    assert worker.credits == SLOTS


# ---------------------------------------------------------------- calls


async def test_a_call_takes_a_slot_until_its_last_token(scene: Scene) -> None:
    worker = await scene.connect()
    call, other = ask(), ask()
    await scene.run(call, other)
    assert (call.wire_id, other.wire_id) == (1, 2)
    assert (worker.credits, call.replica) == (SLOTS - 2, worker)
    scene.say(DeltaBatch([Delta(1, "a", [97]), Delta(7, "of a cancelled one", [1])]))
    await until(lambda: call.emitted == [97], "a token has come")
    assert scene.told("ended") == [] and worker.credits == SLOTS - 2
    scene.owner.told.clear()
    scene.say(DeltaBatch([Delta(1, "b", [98], finish="stop")]))
    await until(lambda: call.done, "it has ended")
    assert scene.owner.told == [("ended", call), ("free", SLOTS - 1)]
    assert (worker.credits, call.replica) == (SLOTS - 1, None)
    assert list(worker.calls.values()) == [other]


async def test_no_more_than_all_slots_are_taken(scene: Scene) -> None:
    worker = await scene.connect()
    await scene.run(*(ask() for _ in range(SLOTS - 1)))
    assert worker.has_room and worker.has_slot_for(ask())
    await scene.run(ask())
    assert not worker.has_room and not worker.has_slot_for(ask())


async def test_an_answer_goes_on_only_in_its_own_generation(scene: Scene) -> None:
    worker = await scene.connect()
    assert worker.can_run(ask(continuation=begun()))
    assert worker.can_run(ask(continuation=begun("g1+adapter")))
    assert not worker.can_run(ask(continuation=begun("g2")))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("code", "larger", "told"),
    [
        ("invalid_request", False, "ended"),
        ("no_such_code", False, "ended"),
        ("worker_lost", False, "returned"),
        ("model_changed", False, "changed"),
        (ContextLengthExceeded.code, False, "ended"),
        (ContextLengthExceeded.code, True, "returned"),
    ],
)
async def test_a_failed_call_ends_or_goes_elsewhere(
    scene: Scene, code: str, larger: bool, told: str
) -> None:
    worker = await scene.connect()
    scene.owner.larger = larger
    call = ask()
    await scene.run(call)
    scene.owner.told.clear()
    scene.say(Failed(1, code, "no", param="prompt", retry_after_s=3.0), Failed(9, code, "gone"))
    await until(lambda: not worker.calls, "it has failed")
    draining = code == "worker_lost"
    assert scene.owner.told[:2] == [(told, call), ("free", 0 if draining else SLOTS)]
    assert (call.done, call.replica) == (told == "ended", None)
    assert (worker.wanted, worker.refuses) == (not draining, draining)
    assert worker.can_run(ask(continuation=begun())) is not draining


async def test_the_client_reads_why_its_call_failed(scene: Scene) -> None:
    await scene.connect()
    call = ask()
    await scene.run(call)
    scene.say(Failed(1, "no_such_code", "no such thing", param="prompt", retry_after_s=3.0))
    with pytest.raises(RequestError, match="no such thing") as caught:
        _ = [delta async for delta in call]
    assert (caught.value.param, caught.value.retry_after_s) == ("prompt", 3.0)


async def test_what_cannot_be_sent_fails_alone(scene: Scene) -> None:
    worker = await scene.connect()
    call = InflightRequest("m", SamplingParams(max_tokens=5, seed=2**70), prompt="abc")
    worker.send_call(call)
    await until(lambda: call.done, "it has failed")
    assert worker.credits == SLOTS and worker.routable


# ---------------------------------------------------------------- cancel


async def test_a_cancelled_call_frees_its_slot_and_is_remembered_until_confirmed(
    scene: Scene,
) -> None:
    worker = await scene.connect()
    call, other = ask(), ask()
    await scene.run(call, other)
    worker.cancel_call(call)
    assert (worker.credits, call.replica) == (SLOTS - 1, None)
    worker.cancel_call(other)
    await until(lambda: scene.heard[-1] == Cancel(2, True), "the worker knows")
    assert scene.heard[-2] == Cancel(1, True)
    scene.say(Cancelled(1))
    scene.say(DeltaBatch([Delta(2, "late", [1])]))
    await until(lambda: len(worker._cancelled) == 1, "one is confirmed")
    assert worker.take_cancelled() == [other], "it may kill the worker still"
    assert worker.take_cancelled() == []


async def test_a_proven_call_is_forgotten_as_it_is_cancelled(scene: Scene) -> None:
    worker = await scene.connect()
    call = ask()
    await scene.run(call)
    scene.say(DeltaBatch([Delta(1, "a", [1] * PROOF_TOKENS)]))
    await until(lambda: call.proven, "its tokens have come")
    worker.cancel_call(call)
    await until(lambda: scene.heard[-1] == Cancel(1, False), "the worker knows")
    assert worker.take_cancelled() == []


async def test_the_oldest_unconfirmed_calls_are_forgotten(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_connection, "_MOST_CANCELLED", 2)
    worker = await scene.connect()
    calls = [ask() for _ in range(3)]
    await scene.run(*calls)
    for call in calls:
        worker.cancel_call(call)
    assert worker.take_cancelled() == calls[1:]


# ---------------------------------------------------------------- suspects


async def test_a_sent_suspect_holds_the_worker_until_it_is_alone_no_more(scene: Scene) -> None:
    worker = await scene.connect()
    suspect, other = ask(alone_until="done"), ask()
    await scene.run(other)
    await scene.run(suspect)
    assert worker.held and worker.has_room and not worker.has_slot_for(ask())
    assert worker.was_running(other) and not worker.was_running(suspect), (
        "the suspect has not begun"
    )
    scene.say(IsolationStarted(2))
    await until(lambda: worker.alone == 2, "it runs alone")
    assert worker.held and worker.was_running(suspect) and not worker.was_running(other)
    scene.owner.told.clear()
    scene.say(IsolationEnded())
    await until(lambda: not worker.held, "it is alone no more")
    assert worker.has_slot_for(ask())
    assert scene.owner.told == [("free", SLOTS - 2)]


async def test_another_gateways_suspect_holds_the_worker(scene: Scene) -> None:
    worker = await scene.connect()
    scene.say(IsolationStarted(0))
    await until(lambda: worker.held, "it is held")
    assert worker.has_room and worker.credits == 0


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
async def test_a_suspect_that_ends_before_its_turn_holds_nothing(scene: Scene, ends: str) -> None:
    worker = await scene.connect()
    suspect = ask(alone_until="proven")
    await scene.run(suspect)
    if ends == "cancelled":
        worker.cancel_call(suspect)
    else:
        scene.say(Failed(1, "invalid_request", "no"))
    await until(lambda: not worker.held, "it is held no more")
    assert worker.credits == SLOTS


# ---------------------------------------------------------------- lent slots


async def test_slots_are_borrowed_once_and_returned_when_one_is_free(
    scene: Scene,
) -> None:
    worker = await scene.connect(share=2)
    calls = [ask(), ask()]
    await scene.run(*calls)
    worker.borrow()
    worker.borrow()
    await until(lambda: scene.heard[-1] == Borrow(2), "it is asked")
    assert scene.heard.count(Borrow(2)) == 1
    scene.say(Lent(1))
    await until(lambda: worker.credits == 1, "a slot is lent")
    assert scene.told("free")[-1] == 1
    worker.return_lent_slots()
    assert worker.credits == 1, "its own share is in use"
    worker.cancel_call(calls[0])
    worker.return_lent_slots()
    assert worker.credits == 1 and not worker.borrows
    await until(lambda: scene.heard[-1] == Borrow(0), "it is returned")
    scene.owner.told.clear()
    scene.say(Lent(2), IsolationEnded())
    await until(lambda: bool(scene.owner.told), "both are heard")
    assert worker.credits == 1, "an answer to an earlier request lends nothing"


async def test_the_only_gateway_borrows_nothing(scene: Scene) -> None:
    worker = await scene.connect(share=1)
    worker.borrow()
    assert not worker.borrows


async def test_a_new_share_returns_what_was_lent(scene: Scene) -> None:
    worker = await scene.connect(share=2)
    worker.borrow()
    scene.say(Lent(2))
    await until(lambda: worker.credits == SLOTS, "slots are lent")
    worker.set_share(2)
    assert worker.borrows
    worker.set_share(4)
    assert (worker.borrows, worker.credits) == (False, 1)


# ---------------------------------------------------------------- retire


async def test_a_retired_worker_without_calls_is_left_at_once(scene: Scene) -> None:
    worker = await scene.connect()
    worker.retire()
    await until(lambda: scene.closed == 1, "it is left")
    assert not worker.undo_retire()
    await settle()
    assert len(scene.peers) == 1, "it is not dialled again"


async def test_a_retired_worker_finishes_its_calls_and_takes_continuations(scene: Scene) -> None:
    worker = await scene.connect()
    first, second = ask(), ask()
    await scene.run(first, second)
    worker.retire()
    assert not worker.has_slot_for(ask()) and not worker.has_slot_for(
        ask(continuation=begun(), alone_until="done")
    )
    assert worker.has_slot_for(ask(continuation=begun()))
    await scene.run(*(ask(continuation=begun()) for _ in range(SLOTS - 2)))
    assert not worker.has_slot_for(ask(continuation=begun())), "all its slots are in use"
    for wire_id in range(1, SLOTS):
        scene.say(DeltaBatch([Delta(wire_id, "", [], finish="stop")]))
    await until(lambda: len(worker.calls) == 1, "but one have ended")
    assert scene.closed == 0
    scene.say(DeltaBatch([Delta(SLOTS, "", [], finish="stop")]))
    await until(lambda: scene.closed == 1, "it is left with its last call")


async def test_a_retired_worker_is_left_when_its_last_call_is_cancelled(scene: Scene) -> None:
    worker = await scene.connect()
    call = ask()
    await scene.run(call)
    worker.retire()
    worker.cancel_call(call)
    await settle()
    assert scene.closed == 0, "it may yet harm the worker"
    scene.say(Cancelled(call.wire_id))
    await until(lambda: scene.closed == 1, "it is left")


async def test_a_retired_worker_with_calls_can_come_back(scene: Scene) -> None:
    worker = await scene.connect()
    await scene.run(ask())
    worker.retire()
    worker.refuses = True
    assert worker.credits < 0 and worker.undo_retire()
    assert (worker.wanted, worker.refuses, worker.credits) == (True, False, SLOTS - 1)


# ---------------------------------------------------------------- death


async def test_a_death_gives_all_calls_back_and_is_followed_by_a_new_connection(
    scene: Scene,
) -> None:
    worker = await scene.connect(share=2)
    calls = [ask(), ask()]
    await scene.run(*calls)
    worker.borrow()
    scene.say(Lent(1), IsolationStarted(0))
    await until(lambda: worker.held, "it is held")
    scene.peers[-1].close()
    await until(lambda: bool(scene.told("lost")), "it is lost")
    assert scene.told("lost") == [calls]
    assert all(call.replica is None for call in calls) and not worker.calls
    assert scene.owner.lost == (False, False, False)
    await until(lambda: worker.routable, "it is connected again")
    assert not worker.held and worker.credits == 2
    assert [type(one) for one in scene.heard].count(Hello) == 2


async def test_the_log_names_the_loss_and_how_long_it_took(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []

    class Log:
        def info(self, event: str, **fields: Any) -> None: ...

        def warning(self, event: str, **fields: Any) -> None:
            said.append({"event": event, **fields})

    monkeypatch.setattr(worker_connection, "log", Log())
    worker = await scene.connect()
    await scene.run(ask(), ask())
    worker.retire()
    scene.peers[-1].close()
    await until(lambda: bool(said), "it is logged")
    assert (said[0]["event"], said[0]["in_flight"], said[0]["error"]) == ("worker_lost", 2, "EOF")
    assert 0 <= said[0]["took_ms"] < 1000
    assert said[0]["sent_elsewhere"] == 0


async def test_an_engine_that_cannot_resume_says_so(scene: Scene) -> None:
    scene.info = msgspec.structs.replace(scene.info, resumes=False)
    worker = await scene.connect()
    assert not worker.resumes
