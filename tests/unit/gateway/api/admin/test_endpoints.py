"""Administration against the operators' socket, and against one that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.config.keys import fast_digest
from servekit.errors import LONGEST_MESSAGE
from servekit.gateway.api.admin import endpoints
from servekit.gateway.app import Application
from servekit.gateway.routing.router import Router
from servekit.protocol.messages import (
    Accepted,
    AccessRules,
    KeyRule,
    Refused,
    Status,
    ToSupervisor,
    Why,
)
from servekit.protocol.transport.connection import Connection, listen_at
from tests.unit.supervisor.admin.test_control_socket import make_api

SALT = b"s" * 32
STATUS = Status("1", 2, "u", "c", 0.0, 3, (), (), False)
RULES = AccessRules(
    tuple(
        KeyRule(name, digest=fast_digest(name.encode(), SALT), admin=name == "root")
        for name in ("root", "user")
    ),
    salt=SALT,
)
ENDPOINTS = [("GET", "/admin/status"), ("GET", "/admin/why/m"), ("POST", "/admin/reload")] + [
    ("POST", f"/admin/{want}/m") for want in ("load", "unload", "sleep", "wake", "restart")
]


class SupervisorAnswers:
    """A supervisor's answers."""

    def __init__(self, reloaded: Accepted | Refused) -> None:
        self.reloaded = reloaded
        self.asked = 0

    async def status_now(self) -> Status:
        self.asked += 1
        return STATUS

    def shutdown(self, now: bool) -> None:
        raise AssertionError("nobody may, over HTTP")

    def why(self, name: str) -> Why | Refused:
        self.asked += 1
        return Why(name, "closed", ()) if name in ("m", "m/0") else Refused("no such", True)

    async def reload(self) -> Accepted | Refused:
        self.asked += 1
        return self.reloaded

    async def restart(self, name: str, wait: bool) -> Accepted | Refused:
        if not name.startswith("m"):
            return Refused(f"no model is called {name!r}", invalid=True)
        return Accepted(f"{name}: restart, {'done' if wait else 'begun'}")


@asynccontextmanager
async def client(
    path: Path | None, rules: AccessRules = RULES, key: str = "root"
) -> AsyncIterator[httpx.AsyncClient]:
    router = Router("test")
    app = Application(router, 10**6, ui=False, operators=path)
    router.access.apply_rules(rules)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),
        base_url="http://servekit",
        headers={"authorization": f"Bearer {key}"},
    ) as http:
        yield http


@asynccontextmanager
async def supervisor_at(
    path: Path, reloaded: Accepted | Refused
) -> AsyncIterator[SupervisorAnswers]:
    supervisor = SupervisorAnswers(reloaded)
    operators = make_api(supervisor)
    await operators.listen(path)
    try:
        yield supervisor
    finally:
        operators.close()


async def test_what_the_supervisor_says(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with supervisor_at(path, Accepted("a added")) as supervisor, client(path) as http:
        status = (await http.get("/admin/status")).json()
        assert (status["pid"], status["models"], status["draining"]) == (2, [], False)
        for name in ("m", "m/0", "m%2F0"):
            why = await http.get(f"/admin/why/{name}")
            wanted = {"model": name.replace("%2F", "/"), "breaker": "closed", "replicas": []}
            assert why.json() == {**wanted, "adapters": [], "residence": None, "scale": None}
        assert (await http.post("/admin/reload")).json() == {"message": "a added"}
        assert (await http.head("/admin/status")).status_code == 200
        assert (await http.get("/admin/reload")).status_code == 405
        assert (await http.post("/admin/shutdown")).status_code == 404
        assert supervisor.asked == 6


async def test_models_are_loaded_from_afar(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with supervisor_at(path, Accepted()), client(path) as http:
        for want in ("load", "unload", "sleep", "wake"):
            done = await http.post(f"/admin/{want}/m")
            assert done.json() == {"message": f"m: {want}, done"}
        begun = await http.post("/admin/load/m?wait=false")
        assert begun.json() == {"message": "m: load, begun"}
        assert (await http.post("/admin/load/m?wait=maybe")).status_code == 400
        unknown = await http.post("/admin/load/org/x")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"] == "no model is called 'org/x'"


async def test_workers_are_replaced_from_afar(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with supervisor_at(path, Accepted()), client(path) as http:
        done = await http.post("/admin/restart/m%2F0")
        assert done.json() == {"message": "m/0: restart, done"}
        begun = await http.post("/admin/restart/m?wait=false")
        assert begun.json() == {"message": "m: restart, begun"}
        assert (await http.post("/admin/restart/org/x")).status_code == 404


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
async def test_who_may_not(tmp_path: Path, method: str, path: str) -> None:
    socket = tmp_path / "control.sock"
    open_to_all = AccessRules(cors=("*",))
    async with supervisor_at(socket, Accepted()) as supervisor:
        for rules, key, status, words in (
            (RULES, "user", 403, "'user' may not administer"),
            (AccessRules(), "root", 403, "on this machine use"),
            (open_to_all, "root", 403, "on this machine use"),
            (RULES, "other", 401, "not known"),
        ):
            async with client(socket, rules, key) as http:
                # in a task of its own, as at the server: whose request it is stays there
                refused = await asyncio.create_task(http.request(method, path))
            assert refused.status_code == status
            assert words in refused.json()["error"]["message"]
        assert supervisor.asked == 0


async def test_refusals_look_as_described(tmp_path: Path) -> None:
    socket, long = tmp_path / "control.sock", "x" * (LONGEST_MESSAGE + 1)
    async with supervisor_at(socket, Refused(long, True)) as supervisor, client(socket) as http:
        invalid = await http.post("/admin/reload")
        assert error(invalid) == (400, "config_error", long)  # all that is wrong with the file
        supervisor.reloaded = Refused("servekit is shutting down")
        assert error(await http.post("/admin/reload")) == (
            (409, "conflict", "servekit is shutting down")
        )
        assert error(await http.get("/admin/why/nope")) == (404, "not_found", "no such")
        document = (await http.get("/openapi.json")).json()["paths"]
    assert {"400", "403", "409", "503"} <= set(document["/admin/reload"]["post"]["responses"])
    told = document["/admin/why/{name}"]["get"]["responses"]
    assert "process" in told["404"]["description"]
    assert "422" not in told


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
async def test_a_supervisor_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    for limit in ("ANSWER_S", "RELOAD_S", "RESIDE_S"):
        monkeypatch.setattr(endpoints, limit, 0.05)
    for operators in (None, tmp_path / "nobody.sock"):
        async with client(operators) as http:
            assert error(await http.request(method, path))[:2] == (503, "supervisor_unavailable")
    for name, wanted in (("hangs-up", (503, "supervisor_unavailable")), ("mute", (504, "timeout"))):
        async with misbehaving(tmp_path / name, hang_up=name == "hangs-up") as left:
            async with client(tmp_path / name) as http:
                assert error(await http.request(method, path))[:2] == wanted
            async with asyncio.timeout(60):
                await left.wait()  # no connection is left behind


@asynccontextmanager
async def misbehaving(path: Path, *, hang_up: bool) -> AsyncIterator[asyncio.Event]:
    """A supervisor that hangs up at once, or says nothing; tells when its client has left."""
    left = asyncio.Event()

    def connect() -> Connection[ToSupervisor]:
        connection: Connection[ToSupervisor] = Connection(
            ToSupervisor,
            lambda message: connection.close() if hang_up else None,
            lambda error: left.set(),
        )
        return connection

    server = await listen_at(path, connect)
    try:
        yield left
    finally:
        server.close()


def error(answer: httpx.Response) -> tuple[int, Any, Any]:
    told = answer.json()["error"]
    return answer.status_code, told["code"], told["message"]
