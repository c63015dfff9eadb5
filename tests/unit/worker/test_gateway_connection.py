"""One gateway's connection at a worker: what is passed on, and in which order it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.errors import RequestError, WireError
from servekit.protocol.forwarding import HttpRequest
from servekit.protocol.messages import (
    PROTOCOL,
    Body,
    Borrow,
    Cancel,
    Delta,
    DeltaBatch,
    Failed,
    Generate,
    Hello,
    ModelInfo,
    SamplingParams,
    TokenBatch,
    WindowUpdate,
    WorkerToGateway,
)
from servekit.protocol.transport.connection import Connection, dial_address, listen_at
from servekit.worker.gateway_connection import GatewayConnection
from servekit.worker.runner import Runner
from tests.unit.gateway.conftest import until

INFO = ModelInfo(100, 4, True, "echo", "none", "cpu")
PARAMS = SamplingParams(max_tokens=5)


class RecordingRunner:
    """What a connection tells its runner."""

    info = INFO
    dead = ""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.lending = SimpleNamespace(borrow=lambda peer, share: self.told.append(("b", share)))
        self.ward = SimpleNamespace(send_state=lambda peer: self.told.append(("ward",)))
        self.engine = SimpleNamespace(spec=SimpleNamespace(name="m/0"))

    def accept(self, peer: GatewayConnection, request: Generate) -> None:
        self.told.append(("accept", request.id, request.body))

    def extend_window(self, peer: GatewayConnection, id: int, size_bytes: int) -> None:
        self.told.append(("window", id, size_bytes))

    def cancel(self, peer: GatewayConnection, id: int, *, tells: bool = False) -> None:
        self.told.append(("cancel", id, tells))

    def on_greeting(self, name: str) -> None:
        self.told.append(("greeting", name))

    def cancel_peer(self, peer: GatewayConnection) -> None:
        self.told.append(("forget",))


class Scene:
    """Both ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runner = RecordingRunner()
        self.got: list[WorkerToGateway] = []
        self.closed: list[Exception | None] = []

    def _connect(self) -> Connection[Any]:
        self.peer = GatewayConnection(cast(Runner, self.runner))
        return self.peer.connection

    async def connect(self, *, greets: bool = True) -> GatewayConnection:
        self.server = await listen_at(self.path, self._connect)
        self.gateway = await dial_address(
            str(self.path),
            lambda: Connection[WorkerToGateway](
                WorkerToGateway, self.got.append, self.closed.append
            ),
        )
        if greets:
            self.gateway.send(Hello(PROTOCOL, "gateway", "gateway/0"))
            await until(lambda: bool(self.got), "it is greeted")
            self.got.clear()
            self.runner.told.clear()
        else:
            await until(lambda: hasattr(self, "peer"), "it is connected")
        return self.peer

    async def tell(self, *messages: Any) -> list[tuple[Any, ...]]:
        """Send messages, and return what the runner is told of them."""
        for message in [*messages, WindowUpdate(99, 1)]:
            self.gateway.send(message)
        await until(lambda: ("window", 99, 1) in self.runner.told, "all are heard")
        self.runner.told.remove(("window", 99, 1))
        return self.runner.told


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    scene = Scene(tmp_path / "w.sock")
    yield scene
    scene.gateway.close()
    scene.server.close()


# ---------------------------------------------------------------- greeting


@pytest.mark.parametrize(("role", "told"), [("gateway", [("greeting", "g")]), ("probe", [])])
async def test_a_hello_is_answered_and_only_a_gateway_is_noted(
    scene: Scene, role: str, told: list[tuple[Any, ...]]
) -> None:
    await scene.connect(greets=False)
    scene.gateway.send(Hello(PROTOCOL, role, "g"))  # type: ignore[arg-type]
    await until(lambda: bool(scene.got), "it is greeted")
    assert scene.got == [Hello(PROTOCOL, "worker", "m/0", INFO)]
    assert scene.runner.told == [("ward",), *told]


async def test_a_worker_whose_engine_died_hangs_up(scene: Scene) -> None:
    scene.runner.dead = "the engine has died"
    await scene.connect(greets=False)
    scene.gateway.send(Hello(PROTOCOL, "gateway", "g"))
    await until(lambda: bool(scene.closed), "it hangs up")
    assert scene.got == [] and scene.runner.told == [("forget",)]


@pytest.mark.parametrize(
    "message", [Hello(PROTOCOL + 1, "gateway", "g"), Generate(1, PARAMS, prompt="a")]
)
async def test_nothing_is_accepted_before_a_fitting_hello(scene: Scene, message: Any) -> None:
    await scene.connect(greets=False)
    scene.gateway.send(message)
    await until(lambda: bool(scene.closed), "it hangs up")
    assert scene.got == [] and scene.runner.told == [("forget",)]


async def test_the_runner_forgets_who_has_gone(scene: Scene) -> None:
    await scene.connect()
    scene.gateway.close()
    await until(lambda: scene.runner.told == [("forget",)], "it is forgotten")


# ---------------------------------------------------------------- requests


async def test_messages_reach_the_runner(scene: Scene) -> None:
    await scene.connect()
    told = await scene.tell(
        Generate(1, PARAMS, prompt="a"), WindowUpdate(1, 5), Cancel(1, True), Borrow(3)
    )
    assert told == [("accept", 1, b""), ("window", 1, 5), ("cancel", 1, True), ("b", 3)]


def forwarded(id: int, size_bytes: int, body: bytes) -> Generate:
    return Generate(id, PARAMS, http=HttpRequest("/v1/x", size_bytes=size_bytes), body=body)


async def test_a_request_is_accepted_with_the_last_piece_of_its_body(scene: Scene) -> None:
    await scene.connect()
    assert await scene.tell(forwarded(1, 2, b"ab")) == [("accept", 1, b"ab")]
    scene.runner.told.clear()
    assert await scene.tell(forwarded(2, 5, b"ab"), Body(2, b"cd")) == []
    assert await scene.tell(forwarded(3, 3, b"x"), Body(2, b"e")) == [("accept", 2, b"abcde")]
    scene.runner.told.clear()
    assert await scene.tell(Body(2, b"late"), Body(7, b"of nobody")) == []
    assert await scene.tell(Body(3, b"yz")) == [("accept", 3, b"xyz")]


async def test_pieces_of_a_cancelled_request_are_dropped(scene: Scene) -> None:
    await scene.connect()
    told = await scene.tell(forwarded(1, 4, b"ab"), Cancel(1, False), Body(1, b"cd"))
    assert told == [("cancel", 1, False)]


# ---------------------------------------------------------------- answers


async def test_all_of_one_turn_goes_in_one_message_of_each_kind(scene: Scene) -> None:
    peer = await scene.connect()
    peer.add_one(1, "a", 97)
    peer.add_delta(Delta(2, "b", [98], finish="stop"))
    peer.add_one(3, "c", 99)
    peer.add_delta(Delta(4, "d", [100]))
    await until(lambda: len(scene.got) >= 2, "both have come")
    assert scene.got == [
        TokenBatch([1, 3], ["a", "c"], [97, 99]),
        DeltaBatch([Delta(2, "b", [98], finish="stop"), Delta(4, "d", [100])]),
    ]


async def test_a_token_never_overtakes_the_delta_before_it(scene: Scene) -> None:
    peer = await scene.connect()
    peer.add_delta(Delta(1, "a", [97], prompt_tokens=3))
    peer.add_one(1, "b", 98)
    await until(lambda: len(scene.got) >= 2, "both have come")
    first, second = scene.got
    assert isinstance(first, DeltaBatch) and isinstance(second, TokenBatch)
    scene.got.clear()
    peer.add_delta(Delta(2, "c", [99]))
    peer.add_one(1, "d", 100)
    await until(lambda: len(scene.got) >= 2, "both have come")
    assert isinstance(scene.got[0], TokenBatch), "what was told in an earlier turn holds up none"


async def test_a_failure_comes_after_the_tokens_before_it(scene: Scene) -> None:
    peer = await scene.connect()
    peer.jobs[1] = 7
    peer.add_one(1, "a", 97)
    peer.fail(1, RequestError("no", param="prompt"))
    assert peer.jobs == {}
    await until(lambda: len(scene.got) >= 2, "both have come")
    assert scene.got == [
        TokenBatch([1], ["a"], [97]),
        Failed(1, RequestError.code, "no", "prompt"),
    ]


async def test_deltas_too_long_together_go_one_by_one_and_one_too_long_fails(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await scene.connect()
    send = peer.connection.send

    def limited(message: Any) -> None:
        if isinstance(message, DeltaBatch) and sum(len(one.text) for one in message.deltas) > 5:
            raise WireError("6 bytes are more than 5")
        send(message)

    monkeypatch.setattr(peer.connection, "send", limited)
    for id, text in enumerate(("abc", "defghi", "jkl")):
        peer.add_delta(Delta(id, text, [1]))
    await until(lambda: len(scene.got) >= 3, "all have come")
    first, failed, last = scene.got
    assert (first, last) == (
        DeltaBatch([Delta(0, "abc", [1])]),
        DeltaBatch([Delta(2, "jkl", [1])]),
    )
    assert isinstance(failed, Failed) and failed.id == 1
    assert failed.message == "the answer is too long: 6 bytes are more than 5"
    assert scene.runner.told[-1] == ("cancel", 1, False), "its job does not go on for nobody"


async def test_a_close_sends_what_is_queued(scene: Scene) -> None:
    peer = await scene.connect()
    peer.add_one(1, "a", 97)
    peer.close()
    await until(lambda: bool(scene.closed), "it is closed")
    assert scene.got == [TokenBatch([1], ["a"], [97])]
