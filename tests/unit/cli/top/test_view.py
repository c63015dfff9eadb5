"""What `servekit top` shows at one moment, in windows of all sizes."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from servekit.cli.top.sampler import Sampler, View
from servekit.cli.top.view import _HEAD, draw_view
from servekit.event_store import Event
from servekit.protocol.control.admin_messages import ModelTraffic
from servekit.protocol.messages import GatewayStatus, ModelStatus, ReplicaStatus, Status
from servekit.protocol.residency import ResidencyStatus
from servekit.protocol.types import GpuStatus

GIB = 2**30


def worker(name: str, **more: object) -> ReplicaStatus:
    plain = ReplicaStatus(name, "ready", "s", 1, "GPU 0 (H200)", ("GPU-0",), rss_bytes=2**20)
    return replace(plain, **more)


def status(*models: ModelStatus, pid: int = 7, tokens: int = 0) -> Status:
    return Status(
        *("0.1.0", pid, "http://127.0.0.1:8000", "a.yaml", time.time() - 65, 50 * 2**20),
        models=models,
        gateways=(GatewayStatus("gateway/0", 2, "ready", requests=12, in_flight=3),),
        draining=False,
        gpus=(GpuStatus(0, "GPU-0", "H200", 140 * GIB, 70 * GIB, 0.87),),
        traffic=tuple(ModelTraffic(model.name, 4, tokens) for model in models),
    )


MODEL = ModelStatus(
    *("qwen", "vllm", "Qwen/Qwen3", 0),
    (
        worker("qwen/0", gpu_bytes=60 * GIB, held_bytes=(60 * GIB,), running=3, kv_used=0.37),
        worker("qwen/1", state="backoff", reason="killed \x1b[2Jby SIGKILL", restarts=2),
    ),
)
EVENTS = tuple(Event(time.time(), "exit", "x\x1b[0m" * 40, "qwen", "qwen/0") for _ in range(50))


def text(view: View, width: int = 80, height: int | None = 24) -> str:
    return "\n".join(line.plain for line in draw_view(view, width, height))


def test_all_of_it_is_there() -> None:
    shown = text(View(status(MODEL), {"qwen": 1234.5}, EVENTS[:2], at=time.time()), 120, 30)
    head, gpu, names, model, first, second, gateway, *_ = shown.splitlines()
    assert head.startswith("servekit 0.1.0  http://127.0.0.1:8000  up 1 min 5 s")
    assert "70.0 GiB of 140.0 GiB" in gpu and "busy  87%" in gpu and "qwen/0 60.0 GiB" in gpu
    assert names.split() == [*_HEAD]
    assert " ".join(model.split()) == "qwen ready 1/2 4 3 0 37% 1234 2 60.0 GiB"
    assert first.split()[:5] == ["qwen/0", "ready", "3", "0", "37%"]
    assert "backoff" in second and "killed by SIGKILL" in second
    assert gateway.split()[:3] == ["gateway/0", "ready", "3"]
    assert "EVENTS" in shown and "\x1b" not in shown and shown.endswith("q quit")


def test_gpus_of_other_nodes_have_their_names_before_them() -> None:
    first = GpuStatus(0, "GPU-0", "H200", 140 * GIB, 70 * GIB, 0.87, node="10.0.0.4")
    gpus = (first, replace(first, uuid="GPU-x", node="10.0.0.15"))
    shown = text(View(replace(status(MODEL), gpus=gpus), {}, (), at=time.time()), 120, 30)
    assert [line[:16] for line in shown.splitlines()[1:3]] == [
        "10.0.0.4  GPU 0 ",
        "10.0.0.15 GPU 0 ",
    ]
    assert shown.count("qwen/0 60.0 GiB") == 1


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [5, 10, 24, 60])
@pytest.mark.parametrize("models", [0, 1, 40])
def test_it_is_never_larger_than_its_window(width: int, height: int, models: int) -> None:
    many = [replace(MODEL, name=f"模型-{number}" * 3) for number in range(models)]
    view = View(status(*many), {}, EVENTS, "no servekit runs in /x", time.time())
    shown = draw_view(view, width, height)
    assert len(shown) == height
    assert max(cell_len(line.plain) for line in shown) <= width
    assert all("\n" not in line.plain for line in shown)
    assert "no servekit" in shown[1].plain
    if models == 40 and height == 24 and width >= 40:
        assert "more lines" in text(view, width, height)


def test_a_tall_window_has_no_limit_and_all_days() -> None:
    view = View(status(*[MODEL] * 20), {}, EVENTS, at=time.time())
    shown = text(view, 200, None)
    assert shown.count("qwen/0 ") >= 20 and "more lines" not in shown
    assert time.strftime("%Y-%m-%d") in shown


def test_models_that_are_away_or_failed() -> None:
    away = replace(
        MODEL, replicas=(), residence=ResidencyStatus("on_demand", "asleep", "asleep since 9")
    )
    failed = replace(MODEL, name="bad", replicas=(worker("bad/0", state="failed", pid=0),))
    gone = replace(MODEL, name="gone", replicas=())
    shown = text(View(status(away, failed, gone), at=time.time()), 120)
    rows = {line.split()[0]: line for line in shown.splitlines() if line.split()}
    assert "asleep since 9" in rows["qwen"]
    assert rows["bad"].split()[1] == "failed" and rows["gone"].split()[1] == "stopped"


# ---- rates


def test_rates_are_those_of_the_last_seconds() -> None:
    sampler = Sampler()
    assert sampler.view(()) is None
    for second in range(60):
        sampler.add_status(status(MODEL, tokens=second * 10 if second < 40 else 390), float(second))
    view = sampler.view(())
    assert view is not None and view.rates == {"qwen": 0.0}
    assert len(sampler._samples) <= 8, "it does not grow"
    sampler.add_status(status(MODEL, tokens=490), 60.0)
    view = sampler.view(())
    assert view is not None and view.rates["qwen"] == pytest.approx(20.0)


def test_another_supervisor_begins_anew_and_a_lost_one_is_told() -> None:
    sampler = Sampler()
    sampler.add_status(status(MODEL, tokens=1000), 0.0)
    sampler.add_status(status(MODEL, pid=8, tokens=5), 1.0)
    view = sampler.view(())
    assert view is not None and view.rates == {} and not view.trouble
    first, second = sampler.view((), "no servekit runs"), sampler.view((), "no servekit runs")
    assert first is not None and second is not None
    assert first.trouble.startswith("no servekit runs; showing the state of ")
    assert first.trouble == second.trouble, "the time is that of the first look in vain"


def test_at_80_columns_the_clock_is_whole_and_workers_are_told_apart() -> None:
    name = "smollm2-135m-instruct"
    ready = worker(f"{name}/0")
    ill = worker(f"{name}/1", state="backoff", reason="killed by SIGKILL")
    standby = worker(f"{name}/standby-0")
    model = replace(MODEL, name=name, replicas=(ready, ill), standbys=(standby,))
    at = time.mktime((2026, 1, 2, 23, 45, 56, 0, 0, -1))
    head, _, columns, _, *rows = text(View(status(model), {}, (), at=at), 80).splitlines()
    assert head.endswith(" 23:45:56") and "up " in head
    assert columns.split() == [*_HEAD[:-1]]
    assert rows[0].split()[0] == f"{name}/0" and "/standby-0 " in rows[3]
    assert rows[2].strip() == "killed by SIGKILL"


@pytest.mark.parametrize("width", [80, 99, 100, 120])
def test_a_name_that_has_room_is_whole(width: int) -> None:
    name = "smollm2-135m-instruct"
    model = ModelStatus(name, "transformers", "-", 0, (worker(f"{name}/0"),))
    shown = text(View(status(model), at=time.time()), width)
    assert f"\n{name} " in shown and f"\n  {name}/0 " in shown
