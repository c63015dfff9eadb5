from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import ConfigError, ServekitError, StartError
from servekit.protocol.adapters import (
    Adapters,
    AdapterSpec,
    AddAdapter,
    GetAdapters,
    RemoveAdapter,
)
from servekit.protocol.control.metrics_messages import Figures, GetMetrics, Series
from servekit.protocol.control.remote_gateway import AdminRequest, AdminResponse
from servekit.protocol.messages import (
    Accepted,
    CreateLink,
    GetStatus,
    GetWhy,
    Link,
    RedeemLink,
    Refused,
    Reload,
    Shutdown,
    Status,
    ToSupervisor,
    Why,
)
from servekit.protocol.residency import SetResidency
from servekit.supervisor.admin.control_socket import AdminApi, query_supervisor

STATUS = Status("1", 2, "u", "c", 0.0, 3, (), (), False)


class Answers:
    """A supervisor's answers."""

    def __init__(self) -> None:
        self.heard: list[bool] = []

    async def status_now(self) -> Status:
        return STATUS

    def shutdown(self, now: bool) -> None:
        self.heard.append(now)

    def why(self, name: str) -> Why | Refused:
        return Why(name, "closed", ()) if name == "m" else Refused("no such model", True)

    async def reload(self) -> Accepted | Refused:
        await asyncio.sleep(0)
        return Accepted("a added")

    def create_link(self) -> Link | Refused:
        return Link("u/ui?token=t", 600.0)

    def redeem_link(self, token: str) -> Accepted | Refused:
        return Accepted() if token == "t" else Refused("used")


class AdapterAnswers:
    """One adapter may be had."""

    async def handle_add(self, request: AddAdapter) -> Accepted | Refused:
        await asyncio.sleep(0)
        if request.adapter.name == "x":
            return Accepted("x serves")
        return Refused("nobody is ready", retry_after_s=5.0)

    async def handle_remove(self, request: RemoveAdapter) -> Accepted | Refused:
        return Refused(f"there is no {request.name}", True)

    def list_adapters(self, request: GetAdapters) -> Adapters | Refused:
        return Adapters({request.model: ()})


class SwapAnswers:
    """Loads one model."""

    async def reside(self, request: SetResidency) -> Accepted | Refused:
        await asyncio.sleep(0)
        if request.model == "m":
            return Accepted(f"m: {request.want}, {'done' if request.wait else 'begun'}")
        return Refused(f"no model is called {request.model!r}", True)


class MetricAnswers:
    """Has counted one thing."""

    def answer_metrics(self, request: GetMetrics) -> Figures:
        return Figures((Series("servekit_queue_depth", ("m",), [3.0]),))


def make_api(supervisor: Any, adapters: Any = None) -> AdminApi:
    """Return the API over answers that are made up."""
    swap, metrics = SwapAnswers(), MetricAnswers()
    made_up: tuple[Any, ...] = (supervisor, adapters or AdapterAnswers(), swap, metrics)
    return AdminApi(*made_up)


class BrokenAnswers(Answers):
    async def status_now(self) -> Status:
        raise RuntimeError("bug")


async def test_operators_are_answered_and_heard(tmp_path: Path) -> None:
    supervisor = Answers()
    operators = make_api(supervisor)
    path = tmp_path / "control.sock"
    await operators.listen(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert await query_supervisor(path, GetStatus()) == STATUS
    assert await query_supervisor(path, Shutdown(True)) == Accepted()
    assert await query_supervisor(path, Shutdown()) == Accepted()
    assert supervisor.heard == [True, False]
    assert await query_supervisor(path, GetWhy("m")) == Why("m", "closed", ())
    assert await query_supervisor(path, Reload()) == Accepted("a added")
    assert await query_supervisor(path, CreateLink()) == Link("u/ui?token=t", 600.0)
    assert await query_supervisor(path, RedeemLink("t")) == Accepted()
    with pytest.raises(ServekitError, match="used"):
        await query_supervisor(path, RedeemLink("other"))
    with pytest.raises(ConfigError, match="no such model"):
        await query_supervisor(path, GetWhy("n"))
    operators.close()


async def test_a_gateway_may_pass_on_what_is_asked_over_http_and_no_more() -> None:
    supervisor, told = Answers(), asyncio.Queue[AdminResponse]()
    operators = make_api(supervisor)
    questions: list[ToSupervisor] = [GetStatus(), GetWhy("m"), Reload(), Shutdown(True)]
    questions += [CreateLink(), RedeemLink("t")]
    for id, question in enumerate(questions):
        operators.answer_remote(AdminRequest(id, question), told.put_nowait)
    answers = {}
    for _ in questions:
        answered = await asyncio.wait_for(told.get(), 60)
        answers[answered.id] = answered.answer
    assert answers == {
        0: STATUS,
        1: Why("m", "closed", ()),
        2: Accepted("a added"),
        3: Refused("a gateway may not request that"),
        4: Refused("a gateway may not request that"),
        5: Accepted(),
    }
    assert not supervisor.heard


async def test_a_gateway_is_told_that_there_is_no_answer() -> None:
    told = asyncio.Queue[AdminResponse]()
    operators = make_api(BrokenAnswers())
    operators.answer_remote(AdminRequest(1, GetStatus()), told.put_nowait)
    answered = await asyncio.wait_for(told.get(), 60)
    assert isinstance(answered.answer, Refused)


async def test_operators_are_answered_about_adapters(tmp_path: Path) -> None:
    operators = make_api(Answers())
    path = tmp_path / "control.sock"
    await operators.listen(path)
    assert await query_supervisor(path, AddAdapter("m", AdapterSpec("x", "/x"))) == Accepted(
        "x serves"
    )
    assert await query_supervisor(path, GetAdapters("m")) == Adapters({"m": ()})
    with pytest.raises(ServekitError, match="nobody is ready"):
        await query_supervisor(path, AddAdapter("m", AdapterSpec("y", "/y")))
    with pytest.raises(ConfigError, match="there is no z"):
        await query_supervisor(path, RemoveAdapter("z"))
    operators.close()


async def test_nobody_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no servekit runs in"):
        await query_supervisor(tmp_path / "control.sock", GetStatus())


async def test_a_stale_socket_is_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "control.sock"))
    with pytest.raises(StartError, match="no servekit runs in"):
        await query_supervisor(tmp_path / "control.sock", GetStatus())


async def test_a_supervisor_that_does_not_answer_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "control.sock"))
        sock.listen()
        with pytest.raises(ServekitError, match=r"did not answer within 0\.1 s"):
            await query_supervisor(tmp_path / "control.sock", GetStatus(), timeout_s=0.1)


async def test_operators_are_answered_about_models(tmp_path: Path) -> None:
    operators = make_api(Answers())
    path = tmp_path / "control.sock"
    await operators.listen(path)
    assert await query_supervisor(path, SetResidency("m", "load")) == Accepted("m: load, done")
    assert await query_supervisor(path, SetResidency("m", "sleep", wait=False)) == Accepted(
        "m: sleep, begun"
    )
    with pytest.raises(ConfigError, match="no model is called 'x'"):
        await query_supervisor(path, SetResidency("x", "wake"))
    operators.close()


async def test_gateways_are_told_the_figures(tmp_path: Path) -> None:
    operators = make_api(Answers())
    path = tmp_path / "control.sock"
    await operators.listen(path)
    assert await query_supervisor(path, GetMetrics()) == MetricAnswers().answer_metrics(
        GetMetrics()
    )
    operators.close()


async def test_one_that_breaks_off_is_a_sentence(tmp_path: Path) -> None:
    operators = make_api(BrokenAnswers())
    await operators.listen(tmp_path / "control.sock")
    with pytest.raises(ServekitError, match="closed the connection"):
        await query_supervisor(tmp_path / "control.sock", GetStatus())
    operators.close()
