"""The life of a gateway in this process: it serves, follows its supervisor, drains and ends.

Only the channel to the supervisor is the test's; the worker, the sockets and the HTTP are real.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.gateway import server
from servekit.gateway.http.protocol import Http
from servekit.gateway.http.tls import Tls
from servekit.gateway.http.unix_proxy import UnixProxy
from servekit.gateway.server import Doors, Gateway, Settings
from servekit.gateway.supervisor_channel import TcpChannel
from servekit.gateway.telemetry.request_recorder import RECORDER
from servekit.protocol.access import KeyBudgets, SpentBudget
from servekit.protocol.adapters import TopologyApplied
from servekit.protocol.control.remote_gateway import CertificateUpdate
from servekit.protocol.messages import (
    AccessRules,
    Drain,
    KeyRule,
    KeyUsage,
    KeyUse,
    ModelStatus,
    Ping,
    Serving,
    Stop,
    Topology,
)
from servekit.protocol.transport.socket_handover import DRAIN, inherit_sockets
from tests.polling import poll_async
from tests.unit.gateway.conftest import ENDLESS, ENDLESS_TOKENS, Service

MAX_BODY_BYTES = 1000
Make = Callable[..., Any]


class Supervisor:
    """The other end of the channel: what the gateway has said, and what it is told."""

    has_supervisor = True

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.closed = False
        self.tell: Callable[[Any], None] = lambda message: None
        self.leave: Callable[[Exception | None], None] = lambda error: None

    async def open(self, on_message: Any, on_end: Any) -> None:
        self.tell, self.leave = on_message, on_end

    def send(self, message: Any) -> None:
        self.heard.append(message)

    async def close(self) -> None:
        self.closed = True


class Scene:
    """A gateway, its supervisor, and a client."""

    def __init__(self, **settings: Any) -> None:
        self.supervisor = Supervisor()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        known: dict[str, Any] = {
            "name": "gateway/0",
            "channel": self.supervisor,
            "listen_fds": (listener.detach(),),
            "max_body_bytes": MAX_BODY_BYTES,
            "ui": False,
            "ui_socket": None,
        }
        self.gateway = Gateway(Settings(**(known | settings)))
        self.running = asyncio.create_task(self.gateway.run())

    async def serve(self, *models: ModelStatus, **access: Any) -> None:
        self.supervisor.tell(Topology(models, serial=7, access=AccessRules(**access)))
        await poll_async("it serves", lambda: Serving() in self.supervisor.heard)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.get(f"http://127.0.0.1:{self.port}{path}", timeout=30)

    async def end(self) -> int:
        async with asyncio.timeout(30):
            return await self.running


@pytest.fixture
async def make_scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    """Gateways change what all connections of their process share."""
    for owner, name in (
        (Http, "leaving"), (Http, "write_timeout_s"), (Http.bodies, "limit_bytes"),
        (RECORDER, "on"), (RECORDER, "path"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(server, "_LAST_WORDS_S", 0.01)
    made: list[Scene] = []

    async def make(**settings: Any) -> Scene:
        made.append(Scene(**settings))
        await poll_async(
            "it listens to its supervisor",
            lambda: made[-1].supervisor.tell.__name__ == "_on_message",
        )
        return made[-1]

    yield make
    for scene in made:
        scene.supervisor.tell(Stop())
        await asyncio.wait([scene.running], timeout=30)
    gc.unfreeze()


async def test_it_serves_once_it_knows_the_models(make_scene: Make) -> None:
    """Else a gateway that was started again would answer 404 at first."""
    scene = await make_scene()
    waiting = asyncio.create_task(scene.get("/livez"))
    await asyncio.wait([waiting], timeout=0.05)
    assert scene.supervisor.heard == [] and not waiting.done()
    await scene.serve()
    assert (await waiting).status_code == 200
    assert scene.supervisor.heard[:2] == [TopologyApplied(7), Serving()]
    assert gc.get_freeze_count() > 0, "modules are not walked at each collection"


async def test_it_says_which_topology_it_has_when_it_is_asked(make_scene: Make) -> None:
    scene = await make_scene()
    await scene.serve()
    scene.supervisor.heard.clear()
    scene.supervisor.tell(Topology((), serial=8))
    scene.supervisor.tell(Ping(1))
    scene.supervisor.tell(Ping(2))
    applied = [one for one in scene.supervisor.heard if isinstance(one, TopologyApplied)]
    assert applied == [TopologyApplied(8)] * 3


async def test_it_ends_with_success_when_it_is_told(make_scene: Make) -> None:
    scene = await make_scene()
    await scene.serve()
    scene.supervisor.tell(Stop())
    scene.supervisor.tell(Stop())
    assert await scene.end() == 0
    assert scene.supervisor.closed
    with pytest.raises(httpx.ConnectError):
        await scene.get("/livez")


async def test_it_may_be_told_to_end_before_it_serves(make_scene: Make) -> None:
    scene = await make_scene()
    scene.supervisor.tell(Stop())
    assert await scene.end() == 0


async def ask_for_ever(scene: Scene) -> httpx.Response:
    body = {"model": "m", "prompt": "x", "max_tokens": ENDLESS_TOKENS}
    async with httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{scene.port}/v1/completions"
        return await client.post(url, json=body, timeout=60)


async def begin(scene: Scene, service: Service) -> asyncio.Task[httpx.Response]:
    """Ask a worker for what takes until it is ended."""
    worker = await service.worker(**ENDLESS)
    await scene.serve(ModelStatus("m", "echo", "-", 0, (worker.status(),)))
    asking = asyncio.create_task(ask_for_ever(scene))
    await poll_async("it runs", lambda: worker.running)
    return asking


async def test_requests_that_its_end_interrupts_are_told(
    make_scene: Make, service: Service
) -> None:
    scene = await make_scene()
    asking = await begin(scene, service)
    scene.supervisor.tell(Stop())
    assert await scene.end() == 0
    answer = await asking
    assert answer.status_code == 503
    assert "servekit shut down before this was done" in answer.json()["error"]["message"]


async def test_it_ends_once_its_requests_are_done_if_it_drains(
    make_scene: Make, service: Service
) -> None:
    scene = await make_scene()
    asking = await begin(scene, service)
    scene.supervisor.tell(Drain())
    refused = await ask_for_ever(scene)
    assert refused.status_code == 503
    assert not scene.running.done() and not asking.done()
    asking.cancel()
    assert await scene.end() == 0


async def test_it_ends_at_once_if_it_drains_and_has_none(make_scene: Make) -> None:
    scene = await make_scene()
    await scene.serve()
    scene.supervisor.tell(Drain())
    assert await scene.end() == 0


async def test_if_it_drains_it_ends_once_its_answers_are_read(
    make_scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await make_scene()
    await scene.serve()
    looks: list[bool] = []

    def look(doors: Doors) -> bool:
        looks.append(scene.gateway._stop.done())
        return len(looks) < 3

    monkeypatch.setattr(Doors, "are_used", look)
    scene.supervisor.tell(Drain())
    assert await scene.end() == 0
    assert looks == [False] * 3


async def test_signals_end_it_in_order(make_scene: Make) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    scene = await make_scene()
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert before[0] is not after[0] and before[1] is not after[1]
    await scene.serve()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await scene.end() == 0


# ---------------------------------------------------------------- rules


async def test_rules_hold_for_all_connections(make_scene: Make, tmp_path: Path) -> None:
    scene = await make_scene(request_log=tmp_path / "requests.jsonl")
    await scene.serve(log_requests=False, write_timeout_s=3.0, max_queue_bytes=5000)
    assert (RECORDER.on, Http.write_timeout_s, Http.bodies.limit_bytes) == (False, 3.0, 5000)
    assert RECORDER.path == tmp_path / "requests.jsonl"
    scene.supervisor.tell(Topology((), access=AccessRules(max_queue_bytes=10)))
    assert (RECORDER.on, Http.bodies.limit_bytes) == (True, MAX_BODY_BYTES), "one body fits"


async def test_what_keys_have_used_elsewhere_and_used_up_counts_here(make_scene: Make) -> None:
    scene = await make_scene()
    await scene.serve(keys=(KeyRule("ada", digest=b"d", requests_per_minute=10),))
    ada = scene.gateway._router.access.callers["ada"]
    scene.supervisor.tell(KeyUsage("gateway/1", (KeyUse("ada", 8, 0, 0),)))
    assert ada.requests is not None and ada.requests.level(asyncio.get_running_loop().time()) < 3
    spent = SpentBudget("ada", "daily", 100, 2e9)
    scene.supervisor.tell(KeyBudgets((spent,)))
    assert ada.spent == spent


async def test_the_log_of_requests_is_written_at_the_end(make_scene: Make, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    scene = await make_scene(request_log=path)
    await scene.serve(sessions=b"a secret")
    assert (await scene.get("/v1/nothing")).status_code == 404
    scene.supervisor.tell(Stop())
    await scene.end()
    assert "/v1/nothing" in path.read_text()


# ---------------------------------------------------------------- without a supervisor


async def test_without_its_supervisor_it_is_killed_with_all_that_it_started(
    make_scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(server, "end_group", lambda: ended.append("group"))
    scene = await make_scene()
    await scene.serve()
    scene.supervisor.leave(None)
    assert ended == ["group"]
    scene.supervisor.tell(Stop())
    scene.supervisor.leave(None)
    assert ended == ["group"], "at its end that is no loss"


async def test_a_gateway_elsewhere_ends_in_order_when_nobody_comes_back(
    make_scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "end_group", lambda: pytest.fail("it leads no group of ours"))
    scene = await make_scene()
    await scene.serve()
    monkeypatch.setattr(scene.gateway, "_channel", TcpChannel.__new__(TcpChannel))
    scene.supervisor.leave(TimeoutError("no supervisor for 60 s"))
    monkeypatch.setattr(scene.gateway, "_channel", scene.supervisor)
    assert await scene.end() == 0


async def test_a_gateway_that_outlives_its_supervisor_ends_when_nobody_follows(
    make_scene: Make, tmp_path: Path
) -> None:
    scene = await make_scene(outlive=(tmp_path / "heir.sock", 0.05))
    await scene.serve()
    scene.supervisor.leave(None)
    assert await scene.end() == 0


async def test_a_gateway_that_outlives_its_supervisor_serves_meanwhile(
    make_scene: Make, tmp_path: Path
) -> None:
    scene = await make_scene(outlive=(tmp_path / "heir.sock", 60.0))
    await scene.serve()
    scene.supervisor.leave(None)
    assert (await scene.get("/livez")).status_code == 200


async def test_its_successors_take_its_port_and_it_ends_after_its_requests(
    make_scene: Make, service: Service, tmp_path: Path
) -> None:
    heir = tmp_path / "heir.sock"
    scene = await make_scene(outlive=(heir, 60.0))
    asking = await begin(scene, service)
    scene.supervisor.leave(None)
    await poll_async("it waits for an heir", heir.exists)
    [(elder, [listener])] = await asyncio.to_thread(inherit_sockets, [heir])
    with elder, listener:
        assert listener.getsockname()[1] == scene.port
        elder.send(DRAIN)
        await poll_async("its doors are closed", lambda: Http.leaving)
        assert not scene.running.done() and not asking.done()
        asking.cancel()
        assert await scene.end() == 0


# ---------------------------------------------------------------- the UI


async def test_only_the_first_gateway_serves_the_pages_and_others_forward_to_it(
    make_scene: Make, tmp_path: Path
) -> None:
    scene = await make_scene(name="gateway/1", ui=True, ui_socket=tmp_path / "ui.sock")
    await scene.serve()
    await poll_async("it forwards", lambda: isinstance(scene.gateway._app.ui, UnixProxy))
    assert not (tmp_path / "ui.sock").exists()


async def test_pages_that_cannot_be_brought_up_are_told_of(
    make_scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(gateway: Gateway) -> None:
        raise ImportError("no gradio here")

    monkeypatch.setattr(Gateway, "_serve_ui", fail)
    scene = await make_scene(ui=True)
    await scene.serve()
    said = "the UI failed to start; see the gateway's log"
    await poll_async("it says so", lambda: scene.gateway._app.ui_state == said)
    assert (await scene.get("/livez")).status_code == 200


def test_a_socket_for_the_pages_is_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "ui.sock"
    with server._bound(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(OSError):
        server._bound(tmp_path / "none" / "ui.sock")


# ---------------------------------------------------------------- certificates


async def test_a_certificate_that_is_sent_is_shown_from_then_on(
    make_scene: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    class Shown(Tls):
        def __init__(self) -> None:
            self.context: Any = None  # it serves without TLS

        def load_from_memory(self, stamp: str, pem: bytes) -> None:
            loaded.append((stamp, pem))

        def renew(self, stamp: str) -> None:
            loaded.append(stamp)

    scene = await make_scene(tls=Shown())
    await scene.serve(certificate="first")
    scene.supervisor.tell(CertificateUpdate("second", b"cert", b"key"))
    assert loaded == ["first", ("second", b"cert\nkey")]
