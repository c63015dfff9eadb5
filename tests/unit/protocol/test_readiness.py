"""The table of the rule for readiness, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from servekit.protocol.adapters import AdapterState, AdapterStatus
from servekit.protocol.readiness import adapter_able, in_trouble, is_able
from servekit.protocol.residency import LoadMode, Residency, ResidencyStatus
from servekit.protocol.types import ModelStatus, ReplicaStatus, WorkerState


def model(
    *replicas: tuple[WorkerState, str], load: LoadMode | None = None, tier: Residency = "resident"
) -> ModelStatus:
    """Return a model with workers in these states, each with its trouble; `load`: it may leave."""
    workers = tuple(
        ReplicaStatus(f"m/{index}", state, "", 1, "cpu", trouble=trouble)
        for index, (state, trouble) in enumerate(replicas)
    )
    residence = None if load is None else ResidencyStatus(load, tier)
    return ModelStatus("m", "echo", "m", 0, workers, residence=residence)


@pytest.mark.parametrize(
    ("replicas", "able", "troubled"),
    [
        ([], False, False),
        ([("loading", "")], False, False),
        ([("ready", "")], True, False),
        ([("loading", ""), ("ready", "")], True, False),
        ([("ready", "its endpoint is down")], False, True),
        ([("ready", "its endpoint is down"), ("ready", "")], True, False),
        ([("ready", "its endpoint is down"), ("loading", "")], False, True),
        ([("failed", "its endpoint is down")], False, False),
    ],
)
def test_a_model_that_stays_serves_by_a_ready_worker_without_trouble(
    replicas: Sequence[tuple[WorkerState, str]], able: bool, troubled: bool
) -> None:
    for load in (None, "on_demand"):
        assert is_able(model(*replicas, load=load)) is able
    assert in_trouble(model(*replicas)) is troubled


def test_a_ready_worker_that_the_caller_cannot_reach_serves_nobody() -> None:
    assert not is_able(model(("ready", "")), reached=False)
    assert not is_able(model(("ready", ""), load="on_demand"), reached=False)


@pytest.mark.parametrize("load", ["on_start", "on_demand", "manual"])
@pytest.mark.parametrize("tier", ["resident", "asleep", "stopped", "coming", "leaving", "failed"])
def test_a_model_that_is_away_is_able_unless_it_failed_or_loads_at_the_start(
    load: LoadMode, tier: Residency
) -> None:
    loads_at_start = (load, tier) == ("on_start", "coming")
    able = tier not in ("failed", "resident") and not loads_at_start
    assert is_able(model(load=load, tier=tier)) is able
    assert is_able(model(load=load, tier=tier), reached=False) is able


@pytest.mark.parametrize(
    ("state", "load", "tier", "able"),
    [
        ("serving", None, "resident", True),
        ("loading", None, "resident", False),
        ("loading", "on_demand", "resident", False),
        ("loading", "on_demand", "asleep", True),
        ("failed", "on_demand", "asleep", False),
        ("serving", "on_demand", "asleep", True),
    ],
)
def test_an_adapter_that_loads_with_its_model_is_able(
    state: AdapterState, load: LoadMode | None, tier: Residency, able: bool
) -> None:
    assert adapter_able(model(load=load, tier=tier), AdapterStatus("a", "p", state)) is able
