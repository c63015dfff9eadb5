"""What is remembered of a model that comes and goes, and what operators are told of it."""

from __future__ import annotations

import asyncio
import math

import pytest

from servekit.protocol.residency import Residency, ResidencyStatus, Want
from servekit.supervisor.model_swap.model_state import ModelState
from tests.unit.supervisor.made_up_deployment import GIB, MadeUp, config, info


def made(*states: str, **keys: object) -> tuple[ModelState, MadeUp]:
    deployment = MadeUp(config(**keys), info=info())
    deployment.have(*states)
    one = ModelState(deployment.real, 0.0)
    one.observe((), 0.0)
    return one, deployment


@pytest.mark.parametrize(
    ("states", "tier"),
    [
        ((), "stopped"),
        (("starting",), "coming"),
        (("backoff",), "coming"),
        (("ready", "failed"), "resident"),
        (("ready", "asleep"), "resident"),
        (("asleep", "asleep"), "asleep"),
        (("asleep", "loading"), "coming"),
        (("failed", "failed"), "failed"),
    ],
)
def test_its_tier_is_read_off_its_workers(states: tuple[str, ...], tier: Residency) -> None:
    assert made(*states)[0].tier == tier


def test_one_that_is_to_have_workers_and_has_none_yet_is_coming() -> None:
    one, deployment = made()
    deployment.wanted = True
    one.observe((), 1.0)
    assert one.tier == "coming"
    deployment.wanted, deployment.replicas = False, made("draining")[1].replicas
    one.observe((), 2.0)
    assert (one.tier, one.since) == ("leaving", 2.0)


async def test_while_its_workers_are_told_to_sleep_it_is_leaving_and_falls_asleep() -> None:
    one, _ = made("ready")
    over = asyncio.Event()

    async def work() -> None:
        await over.wait()

    for doing, tier in (("sleep", "leaving"), ("wake", "coming")):
        one.apply_action(doing, work())  # type: ignore[arg-type]
        one.observe((), 1.0)
        assert (one.tier, one.facts({}, {}).falls_asleep) == (tier, doing == "sleep")
        assert one.task is not None
        over.set()
        await one.task
        over.clear()
        one.observe((), 2.0)
        assert one.tier == "resident"


def test_what_all_gateways_tell_counts() -> None:
    one, _ = made("ready")
    one.observe([(2, 1, 5.0), (1, 0, 4.0)], 6.0)
    facts = one.facts({}, {})
    assert (one.waiting, facts.busy, facts.waiting_since, facts.used_at) == (3, True, 6.0, 6.0)
    one.observe([(1, 0, 5.0)], 7.0)
    assert one.facts({}, {}).waiting_since == 6.0, "somebody has waited all the time"
    one.observe([(0, 0, 6.5)], 9.0)
    facts = one.facts({}, {})
    assert (facts.busy, facts.waiting_since, facts.used_at) == (False, None, 7.0)


def test_it_learns_what_it_takes_to_have_it() -> None:
    one, deployment = made()
    one.mark_started(10.0)
    deployment.have("loading")
    one.observe((), 11.0)
    deployment.have("ready")
    one.observe((), 50.0)
    assert (one.facts({}, {}).load_s, one.facts({}, {}).wake_s) == (40.0, 10.0)
    deployment.have("asleep")
    one.observe((), 60.0)
    one.mark_started(70.0)
    deployment.have("ready")
    one.observe((), 73.0)
    assert (one.facts({}, {}).load_s, one.facts({}, {}).wake_s) == (40.0, 3.0)


@pytest.mark.parametrize(
    ("states", "want", "why"),
    [
        ((), "sleep", "a is stopped; only a model that is loaded can be put to sleep"),
        (("starting",), "sleep", "a is loading; only a model that is loaded"),
        (("starting",), "wake", "a is loading, not asleep; `servekit load` loads it"),
        (("asleep",), "wake", ""),
        (("ready",), "sleep", ""),
        ((), "load", ""),
    ],
)
def test_what_operators_may_ask_for(states: tuple[str, ...], want: Want, why: str) -> None:
    assert made(*states)[0].accept_request(want, 1.0).startswith(why)
    assert bool(made(*states)[0].accept_request(want, 1.0)) == bool(why)


def test_why_one_can_never_sleep() -> None:
    one, deployment = made("ready")
    deployment.info = info(sleeps=False)
    assert one.accept_request("sleep", 1.0).endswith(
        "was not loaded so that it can sleep; give it `idle_sleep_s`"
    )
    remote, _ = made("ready", engine="openai", path="http://127.0.0.1:1/v1")
    assert "the engine openai cannot sleep" in remote.accept_request("sleep", 1.0)


def test_a_wish_is_forgotten_once_it_has_come_true() -> None:
    one, deployment = made()
    assert one.accept_request("load", 5.0) == ""
    assert (one.requested, deployment.told, one.facts({}, {}).waiting_since) == (
        "load",
        ["try again"],
        5.0,
    )
    deployment.have("ready")
    one.observe((), 6.0)
    assert (one.requested, one.facts({}, {}).waiting_since) == ("", None)
    assert one.accept_request("load", 7.0) == ""
    assert one.requested == ""


def test_what_was_refused_is_not_wished_for_any_more() -> None:
    one, _ = made()
    one.accept_request("load", 5.0)
    one.drop_request()
    assert (one.requested, one.facts({}, {}).waiting_since) == ("", None)


def test_to_unload_what_is_coming_stops_it_at_once() -> None:
    one, deployment = made("starting")
    one.accept_request("unload", 1.0)
    assert deployment.told == ["unload"]
    assert one.reason == "stopped by an operator"


def test_requests_load_nothing_that_an_operator_has_stopped_or_keeps_for_himself() -> None:
    held, deployment = made("ready", load="on_start")
    assert not held.comes_and_goes
    held.accept_request("unload", 1.0)
    deployment.have()
    manual = made(load="manual")[0]
    for one in (held, manual):
        one.observe([(1, 0, 2.0)], 2.0)
        assert one.facts({}, {}).waiting_since is None
        assert one.residence("", halted=False).load == "manual"
        told = one.residence("", halted=False, for_operators=True)
        assert told.load == one.deployment.model.load, "as the file says"
        assert one.comes_and_goes
        one.accept_request("load", 3.0)
        assert one.facts({}, {}).waiting_since is not None


def test_who_could_not_be_put_to_sleep_is_left_alone_for_a_while() -> None:
    one, _ = made("ready", idle_sleep_s=5.0)
    assert one.facts({}, {}).can_sleep
    one.sleepless(10.0, "it is not tired")
    one.observe((), 20.0)
    assert not one.facts({}, {}).can_sleep
    one.observe((), 71.0)
    assert one.facts({}, {}).can_sleep
    one.sleepless(80.0, "it is not tired")
    one.accept_request("sleep", 81.0)
    one.observe((), 81.0)
    assert one.facts({}, {}).can_sleep, "an operator may try at any time"


def test_a_client_may_have_it_loaded_and_say_how_long_it_stays() -> None:
    one, deployment = made(idle_unload_s=60.0)
    one.keep_loaded(math.inf, 5.0, loads=True)
    facts = one.facts({}, {})
    assert (facts.stay_s, facts.told_at, facts.waiting_since) == (math.inf, 5.0, 5.0)
    deployment.have("ready")
    one.observe((), 6.0)
    one.keep_loaded(None, 7.0, loads=True)
    assert one.facts({}, {}).waiting_since is None, "it is there"
    assert one.residence("", halted=False).stays_s == 60.0


@pytest.mark.parametrize(("told_at", "stays_s"), [(5.0, 60.0), (7.0, 0.0)])
def test_a_clients_word_is_over_once_the_model_has_gone(told_at: float, stays_s: float) -> None:
    one, deployment = made("ready", idle_unload_s=60.0)
    one.observe((), 4.0)
    one.keep_loaded(0.0, min(told_at, 5.0), loads=False)
    deployment.wanted = False
    one.observe((), 6.0)
    assert one.tier == "leaving"
    if told_at > 6.0:
        one.keep_loaded(0.0, told_at, loads=False)
    deployment.have()
    one.observe((), 8.0)
    assert one.residence("", halted=False).stays_s == stays_s


def test_at_the_end_only_what_will_serve_is_waited_for() -> None:
    one, deployment = made()
    ended = ResidencyStatus("on_demand", "failed", "servekit is shutting down")
    for states in ((), ("asleep",), ("failed",)):
        deployment.have(*states)
        one.observe((), 1.0)
        assert one.residence("", halted=True) == ended
        told = one.residence("", halted=True, for_operators=True).tier
        assert told == ("leaving" if "asleep" in states else "stopped")
    deployment.wanted, deployment.replicas = True, []
    one.observe((), 1.0)
    assert one.residence("", halted=True) == ended, "its load was given up before it had begun"
    deployment.have("starting")
    one.observe((), 1.0)
    assert one.residence("", halted=True).tier == "coming"
    deployment.replicas[0].gpu.lacking = {"GPU-0": GIB}
    assert one.residence("", halted=True) == ended, "nobody goes for it any more"
    deployment.have("ready", "failed")
    one.observe((), 1.0)
    assert one.residence("", halted=True).tier == "resident"


def test_what_the_profile_leaves_out_first_answers_what_waits() -> None:
    one, deployment = made("ready")
    one.accept_request("load", 1.0)
    assert not one.is_left_out(1.0)
    deployment.left_out = "coding"
    one.observe([(1, 0, 1.0)], 1.0)
    assert not one.is_left_out(1.0)
    assert not one.is_left_out(9.0), "a request waits"
    one.observe([(0, 1, 9.0)], 9.0)
    assert one.is_left_out(9.0), "those that run are drained"
    assert "not in the profile 'coding'" in one.accept_request("load", 9.0)
    assert one.accept_request("unload", 9.0) == ""
    deployment.left_out = ""
    assert not one.is_left_out(10.0)
    deployment.left_out = "writing"
    assert not one.is_left_out(10.0), "the gateways are not told yet"
    assert one.is_left_out(11.0)
