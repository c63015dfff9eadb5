from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from servekit.errors import ServekitError
from servekit.protocol.adapters import AdapterStatus
from servekit.protocol.messages import (
    GatewayStatus,
    ModelStatus,
    Progress,
    ReplicaStatus,
    Status,
)
from servekit.protocol.residency import LoadMode, Residency, ResidencyStatus
from servekit.protocol.types import WorkerState
from servekit.supervisor.admin.systemd import (
    Notifier,
    address,
    refuse_unready,
    summary,
    watchdog_s,
)


@pytest.mark.parametrize(
    ("given", "found"),
    [("", ""), ("/run/systemd/notify", "/run/systemd/notify"), ("@abstract", "\0abstract"),
     ("vsock:2:1", ""), ("relative", "")],
)  # fmt: skip
def test_where_to_send_to(given: str, found: str) -> None:
    assert address({"NOTIFY_SOCKET": given}) == found
    assert address({}) == ""


@pytest.mark.parametrize(
    ("environ", "found_s"),
    [({}, 0), ({"WATCHDOG_USEC": "60000000"}, 60), ({"WATCHDOG_USEC": "often"}, 0),
     ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "7"}, 5),
     ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "8"}, 0)],
)  # fmt: skip
def test_how_often(environ: dict[str, str], found_s: float) -> None:
    assert watchdog_s(environ, 7) == found_s


def replica(name: str, state: WorkerState, **more: object) -> ReplicaStatus:
    return ReplicaStatus(name=name, state=state, socket="", pid=1, device="cpu", **more)  # type: ignore[arg-type]


def model(name: str, *replicas: ReplicaStatus, **more: object) -> ModelStatus:
    return ModelStatus(name=name, engine="echo", path="p", created=0, replicas=replicas, **more)  # type: ignore[arg-type]


def comes(load: LoadMode, tier: Residency, reason: str = "") -> dict[str, object]:
    return {"residence": ResidencyStatus(load, tier, reason)}


def status(
    *models: ModelStatus, gateway: str = "ready", draining: bool = False, in_flight: int = 0
) -> Status:
    gateways = (GatewayStatus("gateway/0", 1, gateway, in_flight=in_flight),)
    return Status("0", 1, "http://x", "x.yaml", 0.0, 0, models, gateways, draining)


A = model("a", replica("a/0", "failed"), replica("a/1", "ready"))


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (status(A), "1 of 1 models ready"),
        (status(A, model("later", **comes("on_demand", "stopped"))), "2 of 2 models ready"),
        (status(model("later", **comes("on_demand", "coming")), A), "2 of 2 models ready"),
        (status(model("m", replica("m/0", "draining"), **comes("manual", "leaving"))),
         "1 of 1 models ready"),
        (status(model("m", **comes("manual", "stopped", "by an operator"))), "1 of 1 models ready"),
        (status(A, model("later", **comes("on_demand", "failed", "no room\nat all"))),
         "1 of 2 models ready; later failed: no room"),
        (status(model("at once")), "0 of 1 models ready; at once stopped"),
        (status(model("b", replica("b/0", "ready", trouble="it is down"))),
         "0 of 1 models ready; b/0 cannot serve: it is down"),
        (status(model("b", replica("b/0", "ready", trouble="x"), replica("b/1", "ready"))),
         "1 of 1 models ready"),
        (status(model("b", replica("b/0", "ready"),
                      adapters=(AdapterStatus("ad", "p", "failed", "not there"),))),
         "0 of 1 models ready; ad failed: not there"),
        (status(A, draining=True, in_flight=3), "stopping, 3 requests in flight"),
        (status(model("b", replica("b/0", "loading", progress=Progress("load", 30, 120)))),
         "0 of 1 models ready; b/0 load 25 %"),
        (status(A, model("b", replica("b/0", "loading", progress=Progress("warm-up")))),
         "1 of 2 models ready; b/0 warm-up"),
        (status(model("b", replica("b/0", "failed", reason="no room\nat all"))),
         "0 of 1 models ready; b/0 failed: no room"),
    ],
)  # fmt: skip
def test_the_status_line(of: Status, said: str) -> None:
    assert summary(of) == said


def test_a_gateway_of_another_node_is_no_reason_to_restart_all() -> None:
    ours = status(A)
    elsewhere = GatewayStatus("gateway/10.0.0.2", 0, "backoff", node="10.0.0.2", reason="port")
    refuse_unready(replace(ours, gateways=(*ours.gateways, elsewhere)))
    with pytest.raises(ServekitError, match="gateway/0 backoff"):
        refuse_unready(replace(status(A, gateway="backoff"), models=()))


# ---------------------------------------------------------------- what is sent


Heard = Callable[[], list[str]]


@pytest.fixture
def manager(tmp_path: Path) -> tuple[dict[str, str], Heard]:
    """The environment that names a socket, and what came there so far."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.setblocking(False)

    def heard() -> list[str]:
        try:
            return sock.recv(4096).decode().splitlines()
        except BlockingIOError:
            return []

    return {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "4"}, heard


def test_ready_is_that_a_gateway_answers(manager: tuple[dict[str, str], Heard]) -> None:
    environ, heard = manager
    notifier = Notifier(environ, lambda: 0.0)
    loading = model("b", replica("b/0", "loading"))
    notifier.on_change(status(loading, gateway="starting"))
    assert heard() == ["STATUS=0 of 1 models ready; b/0 loading"]
    notifier.on_change(status(loading))
    assert heard() == ["READY=1"]
    notifier.on_change(status(loading))
    assert heard() == []
    with notifier.reloading():
        assert heard()[0] == "RELOADING=1"
    assert heard() == ["READY=1"]
    notifier.stopping(2.5)
    assert heard() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=2500000"]
    with notifier.reloading():
        assert heard() == []
    assert heard() == []


def test_it_is_fed_while_a_gateway_answers(manager: tuple[dict[str, str], Heard]) -> None:
    environ, heard = manager
    answered_at = 0.0
    notifier = Notifier(environ, lambda: answered_at)
    notifier.feed_watchdog()
    assert heard() == []
    answered_at = float("inf")
    notifier.feed_watchdog()
    assert heard() == ["WATCHDOG=1"]
    answered_at = 0.0
    notifier.feed_watchdog()
    assert heard() == []
    notifier.stopping(1)
    heard()
    notifier.feed_watchdog()
    assert heard() == ["WATCHDOG=1"], "gateways end while it drains"


def test_nobody_who_listens_is_no_harm(tmp_path: Path) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "none")}):
        notifier = Notifier(environ, lambda: 0.0)
        notifier.on_change(status(A))
        notifier.feed_watchdog()
        notifier.stopping(1)


def test_a_manager_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "deaf")}, lambda: 0.0)
        for _ in range(2000):  # more than a socket's queue holds
            notifier.stopping(1)
