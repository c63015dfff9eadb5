"""What the residency policy reads from one model's facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from servekit.protocol.residency import LoadMode, Residency
from servekit.supervisor.model_swap.types import PolicyInput


def model(tier: Residency, load: LoadMode = "on_demand", *, sleeps: bool = False) -> PolicyInput:
    return PolicyInput(
        "m", load, tier, {"gpu": 10}, asleep={"gpu": 3, "cpu": 7}, can_sleep=sleeps,
        load_s=60.0, wake_s=2.0, since=100.0, used_at=90.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tier", "sleeps", "back_s"),
    [
        ("resident", True, 2.0),
        ("resident", False, 60.0),
        ("asleep", False, 2.0),
        ("stopped", True, 60.0),
        ("coming", True, 60.0),
    ],
)
def test_what_can_sleep_is_back_soon(tier: Residency, sleeps: bool, back_s: float) -> None:
    assert model(tier, sleeps=sleeps).back_s == back_s


@pytest.mark.parametrize(
    ("tier", "held", "need"),
    [
        ("resident", {"gpu": 10}, {}),
        ("coming", {"gpu": 10}, {}),
        ("leaving", {"gpu": 10}, {}),
        ("asleep", {"gpu": 3, "cpu": 7}, {"gpu": 7}),
        ("stopped", {}, {"gpu": 10}),
        ("failed", {}, {"gpu": 10}),
    ],
)
def test_a_tier_holds_and_needs_memory(
    tier: Residency, held: dict[str, int], need: dict[str, int]
) -> None:
    assert (model(tier).held_memory, model(tier).needed_memory) == (held, need)


@pytest.mark.parametrize(
    ("tier", "load", "has_claim"),
    [
        ("coming", "on_demand", True),
        ("resident", "on_demand", False),
        ("resident", "on_start", True),
        ("resident", "manual", True),
        ("asleep", "on_start", False),
    ],
)
def test_others_leave_for_what_loads_or_always_stays(
    tier: Residency, load: LoadMode, has_claim: bool
) -> None:
    assert model(tier, load).has_claim is has_claim


def test_quiet_begins_with_the_last_use_or_the_tier() -> None:
    assert model("resident").quiet_s(105.0) == 5.0


def test_one_is_quiet_since_its_last_request_or_since_it_came() -> None:
    one = model("resident")  # since 100, used at 90
    assert one.quiet_s(130.0) == 30.0
    assert replace(one, used_at=120.0).quiet_s(130.0) == 10.0
    assert replace(one, busy=True).quiet_s(130.0) == 0.0
