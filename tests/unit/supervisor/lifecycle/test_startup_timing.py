"""What is kept of a process's starts, from facts in whatever order they come. Clocks are told."""

from __future__ import annotations

import time

import pytest

from servekit.protocol.control.startup_messages import GatewayConnected, Phase, PhaseReport, Start
from servekit.supervisor.lifecycle.exit_history import StartReason, StartupTiming


def begun(cause: str = "up", at_s: float = 100.0, now: float = 101.0) -> StartupTiming:
    starting = StartupTiming()
    starting.occasion = StartReason(cause, at_s)  # type: ignore[arg-type]  # parametrised
    starting.start_record(now)
    return starting


def told(
    starting: StartupTiming, name: str, began_s: float, ended_s: float | None, **more: str
) -> None:
    starting.add_report(PhaseReport(Phase(name, began_s, ended_s, **more)))  # type: ignore[arg-type]


def last(starting: StartupTiming) -> Start:
    found = starting.last()
    assert found is not None
    return found


def spans(start: Start) -> list[tuple[str, float, float | None]]:
    return [(one.name, one.began_s, one.ended_s) for one in start.phases]


def test_a_start_is_told_from_what_it_was_for_to_the_last_gateway() -> None:
    starting = begun()
    starting.begin_phase("interpreter", 101.0)
    told(starting, "worker", 101.5, 102.0)
    told(starting, "load", 102.0, None)
    told(starting, "weights", 102.0, 103.0, within="load")
    told(starting, "load", 102.0, 103.5)
    told(starting, "warm-up", 103.5, 104.0)
    starting.begin_phase("admission", 104.0)
    starting.ready(104.25)
    starting.add_report(GatewayConnected("gateway/0", 104.5))
    starting.add_report(GatewayConnected("gateway/1", 105.0))
    starting.add_report(GatewayConnected("gateway/0", 900.0))  # it was restarted
    start = last(starting)
    assert spans(start) == [
        ("supervisor", 0.0, 1.0),
        ("interpreter", 1.0, 1.5),
        ("worker", 1.5, 2.0),
        ("load", 2.0, 3.5),
        ("weights", 2.0, 3.0),
        ("warm-up", 3.5, 4.0),
        ("admission", 4.0, 4.25),
        ("gateways", 4.25, 5.0),
    ]
    assert (start.cause, start.state, start.total_s, start.first_token_s) == ("up", "up", 5.0, 4.0)


def test_what_it_died_in_stays_open_and_its_end_is_the_next_one_s_beginning() -> None:
    starting = begun("request", 100.0, 100.0)
    told(starting, "import", 100.5, 101.0)
    told(starting, "load", 101.0, None)
    starting.died(103.0)
    start = last(starting)
    assert (start.state, start.total_s, start.first_token_s) == ("died", 3.0, None)
    assert spans(start)[-1] == ("load", 1.0, None)
    starting.start_record(104.0)
    first, second = starting.all("m/0").starts
    assert (first, second.cause) == (start, "restart")
    assert spans(second) == [("back-off", 0.0, 1.0)]


def test_the_file_that_it_died_of() -> None:
    starting = StartupTiming()
    assert starting.find_open_file() == ""
    starting = begun()
    told(starting, "load", 101.0, None)
    assert starting.find_open_file() == ""
    told(starting, "weights", 101.0, None, within="load", file="/model.gguf")
    told(starting, "weights", 101.0, 102.0, within="load", file="/model.gguf")
    told(starting, "images", 102.0, None, within="load", file="/mmproj.gguf")
    starting.died(103.0)
    assert starting.find_open_file() == "/mmproj.gguf"
    starting.start_record(104.0)
    assert starting.find_open_file() == ""


def test_the_life_now_and_the_one_before_are_kept() -> None:
    starting = begun()
    for died_s in (110.0, 120.0, 130.0):
        starting.ready(died_s - 5)
        starting.died(died_s)
        starting.start_record(died_s + 1)
    assert [one.cause for one in starting.all("m/0").starts] == ["restart", "restart"]
    assert [one.state for one in starting.all("m/0").starts] == ["up", "starting"]


@pytest.mark.parametrize(
    ("cause", "name"), [("up", "supervisor"), ("request", "room"), ("operator", "room")]
)
def test_what_was_before_the_process_has_a_name(cause: str, name: str) -> None:
    assert spans(last(begun(cause))) == [(name, 0.0, 1.0)]


def test_an_occasion_holds_once() -> None:
    starting = begun("operator")
    starting.died(102.0)
    starting.start_record(103.0)
    assert last(starting).cause == "restart"


def test_a_start_under_way_is_told_as_far_as_it_is() -> None:
    now = time.monotonic()
    starting = begun(at_s=now - 2, now=now - 1)
    start = last(starting)
    assert start.state == "starting"
    assert start.total_s == pytest.approx(2, abs=0.5)
    assert start.at == pytest.approx(time.time() - 2, abs=0.5)


def test_a_worker_gone_astray_fills_no_memory() -> None:
    starting = begun()
    for number in range(10_000):
        told(starting, f"p{number}", 101.0, 102.0)
    assert len(last(starting).phases) < 300


def test_nothing_is_made_of_facts_before_a_start() -> None:
    starting = StartupTiming()
    starting.add_report(GatewayConnected("gateway/0", 1.0))
    told(starting, "load", 1.0, 2.0)
    starting.ready(3.0)
    starting.died(4.0)
    assert starting.last() is None


def test_this_process_is_younger_than_the_machine_and_older_than_its_test() -> None:
    occasion = StartReason.from_supervisor_start()
    assert occasion.at_s < time.monotonic()
    assert time.monotonic() - occasion.at_s < 24 * 3600
