"""The phases of a start, as real processes tell of them: they add up, life by life."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from servekit.cli.display.startup_timings import covered_s
from servekit.protocol.control.startup_messages import Phase, Start
from tests.integration.instance import Instance, echo
from tests.integration.test_faults_supervisor import cli
from tests.integration.test_residents import complete, on_demand

#: The share of a start that no phase may cover: a busy machine runs other tests between two phases.
SLACK = 0.25


def starts(instance: Instance, name: str) -> tuple[Start, ...]:
    found = [one for one in instance.status().starts if one.name == name]
    return found[0].starts if found else ()


def seen(instance: Instance, name: str, lives: int = 1) -> Start:
    """Its newest start, of so many that are kept, once gateways have greeted it."""

    def probe() -> Start | None:
        known = starts(instance, name)
        over = len(known) == lives and any(one.name == "gateways" for one in known[-1].phases)
        return known[-1] if over else None

    found = instance.until(f"{name} has come up", probe, 60)
    assert found is not None
    return found


def took_s(start: Start, name: str) -> float:
    return sum(_s(start, one) for one in start.phases if one.name == name)


def _s(start: Start, phase: Phase) -> float:
    return (start.total_s if phase.ended_s is None else phase.ended_s) - phase.began_s


def check_adds_up(start: Start) -> None:
    assert start.state == "up"
    assert start.total_s - covered_s(start) < SLACK * start.total_s, start.phases
    assert all(one.ended_s is not None for one in start.phases)
    assert all(0 <= one.began_s <= start.total_s for one in start.phases)
    names = [one.name for one in start.phases]
    assert names.index("worker") < names.index("import") < names.index("load")
    assert start.first_token_s is not None
    assert start.first_token_s <= start.total_s


@pytest.mark.lane("long")
def test_phases_add_up_to_the_time_from_up_to_the_first_token(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", load_s=0.6)], server={"gateways": 2}) as instance:
        start = seen(instance, "a/0")
        check_adds_up(start)
        assert start.cause == "up"
        assert start.phases[0].name == "supervisor"
        assert start.phases[0].began_s == 0
        assert 0.59 < took_s(start, "load") < 3
        (gateway,) = starts(instance, "gateway/1")
        assert [one.name for one in gateway.phases] == ["supervisor", "imports"]
        shown = cli(instance, "ps", "--timings").stdout
        assert "s from `servekit up`, requests reach it after" in shown


def test_a_restart_is_a_new_life_beside_the_one_before(tmp_path: Path) -> None:
    with Instance.up(tmp_path, [echo("a", load_s=0.2)]) as instance:
        first = seen(instance, "a/0")
        os.kill(instance.replica("a/0").pid, signal.SIGKILL)
        second = seen(instance, "a/0", lives=2)
        check_adds_up(second)
        assert second.cause == "restart"
        assert second.phases[0].name == "back-off"
        assert starts(instance, "a/0")[0] == first


@pytest.mark.lane("long")
def test_a_load_on_demand_counts_from_the_request(tmp_path: Path) -> None:
    models = [on_demand("a", load_s=0.3), on_demand("b", load_s=0.3)]
    with Instance.up(tmp_path, models) as instance:
        instance.until_settled()
        assert not starts(instance, "b/0")
        assert complete(instance.url, "a").status_code == 200
        answer = complete(instance.url, "b")
        assert answer.status_code == 200
        start = seen(instance, "b/0")
        check_adds_up(start)
        assert start.cause == "request"
        assert start.total_s <= answer.elapsed.total_seconds() + 0.01
        assert start.total_s > 0.7 * answer.elapsed.total_seconds() - 0.2


@pytest.mark.lane("long")
def test_what_dies_while_it_loads_shows_how_far_it_came(tmp_path: Path) -> None:
    bad = {**echo("bad", load_s=0.3, load_error="no such thing"), "standby": False}
    dead = {**echo("dead", load_s=0.3, exit_on_load=7), "standby": False}
    with Instance.up(tmp_path, [echo("a"), bad, dead]) as instance:
        instance.until("one has died", lambda: starts(instance, "dead/0")[-1].state == "died", 60)
        instance.until("one has failed", lambda: instance.replica("bad/0").state == "failed", 60)
        for name in ("bad", "dead"):
            assert "failed 0." in cli(instance, "why", name).stdout
        told = json.loads(cli(instance, "why", "bad", "--json").stdout)
        (death,) = told["replicas"][0]["exits"]
        failed = {one["name"] for one in death["start"]["phases"] if one["failed"]}
        assert failed == {"load"}
        shown = cli(instance, "ps", "--timings").stdout
        assert "bad/0 at " in shown
        assert "did not come up: failed" in shown
