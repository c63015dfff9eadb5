"""The window of samples: rates, another supervisor, and since when there is no answer."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from servekit.cli.top.sampler import WINDOW_S, Sampler
from servekit.protocol.control.admin_messages import ModelTraffic
from servekit.protocol.messages import Status
from tests.unit.cli.instance import make_status


def of(tokens: int, pid: int = 10) -> Status:
    return replace(make_status(), pid=pid, traffic=(ModelTraffic("m", 0, tokens),))


def rate(sampler: Sampler) -> float | None:
    view = sampler.view(())
    assert view is not None
    return view.rates.get("m")


def test_a_rate_is_that_of_the_window() -> None:
    sampler = Sampler()
    assert sampler.view(()) is None
    sampler.add_status(of(100), 0.0)
    assert rate(sampler) is None, "one sample has no rate"
    sampler.add_status(of(300), 1.0)
    assert rate(sampler) == 200.0
    for second in range(2, 20):
        sampler.add_status(of(300), float(second))
    assert rate(sampler) == 0.0, f"{WINDOW_S} s later"


def test_another_supervisor_begins_anew() -> None:
    sampler = Sampler()
    sampler.add_status(of(1000), 0.0)
    sampler.add_status(of(10, pid=11), 1.0)
    assert rate(sampler) is None
    sampler.add_status(of(5, pid=11), 2.0)
    assert rate(sampler) == 0, "never less than nothing"


def test_the_time_without_an_answer_is_that_of_the_first_look_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def trouble(lost: str) -> str:
        view = sampler.view((), lost)
        assert view is not None and view.at == now[0]
        return view.trouble

    def clock(at: float) -> str:
        return time.strftime("%H:%M:%S", time.localtime(at))

    sampler = Sampler()
    sampler.add_status(of(1), 0.0)
    assert trouble("") == ""
    assert trouble("gone") == f"gone; showing the state of {clock(1000)}"
    now[0] = 1100.0
    assert trouble("gone") == f"gone; showing the state of {clock(1000)}"
    sampler.add_status(of(1), 1.0)
    now[0] = 1200.0
    assert trouble("") == ""
    assert trouble("gone") == f"gone; showing the state of {clock(1200)}"
