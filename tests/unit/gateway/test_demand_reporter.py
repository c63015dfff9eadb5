"""What a gateway tells of models that come and go, and which requests wait for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from servekit.errors import ModelUnavailable
from servekit.gateway.demand_reporter import EVERY_S
from servekit.gateway.routing.request import InflightRequest
from servekit.gateway.routing.router import Router
from servekit.protocol.adapters import AdapterState, AdapterStatus
from servekit.protocol.messages import ModelInfo, ModelStatus, SamplingParams, Topology
from servekit.protocol.residency import KeepAlive, LoadMode, ModelDemand, Residency, ResidencyStatus
from tests.passing_time import passing_time
from tests.unit.gateway.conftest import until

INFO = ModelInfo(64, 4, True, "echo", "none", "cpu")


@dataclass
class Seen:
    """A router without workers, and what it tells."""

    told: list[ModelDemand | KeepAlive] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.router = Router("test", use=self.told.append)

    def stands(
        self, tier: Residency, load: LoadMode = "on_demand", info: ModelInfo | None = INFO
    ) -> None:
        status = ModelStatus(
            "m", "echo", "x", 0, (), info, residence=ResidencyStatus(load, tier, "why")
        )
        self.router.apply_topology(Topology((status,)))


def call(model: str = "m") -> InflightRequest:
    return InflightRequest(model, SamplingParams(max_tokens=1), prompt="x")


@pytest.mark.parametrize("tier", ["stopped", "asleep", "leaving", "coming"])
async def test_a_request_for_a_model_that_is_away_waits_and_is_told_of_at_once(
    tier: Residency,
) -> None:
    seen = Seen()
    seen.stands(tier)
    seen.told.clear()
    seen.router.queue_call(call())
    assert [(one.waiting, one.running) for one in seen.told if isinstance(one, ModelDemand)] == [
        (1, 0)
    ]
    seen.router.queue_call(call())
    assert len(seen.told) == 1  # the next look tells of it
    await until(lambda: len(seen.told) == 2)
    assert seen.told[-1] == ModelDemand("m", 2, 0, 0.0)


@pytest.mark.parametrize(
    ("tier", "state", "listed"),
    [
        ("asleep", "serving", True),
        ("stopped", "loading", True),
        ("stopped", "failed", False),
        ("failed", "serving", False),
        ("resident", "loading", False),
    ],
)
async def test_an_adapter_of_a_model_that_is_away_can_be_asked_and_is_listed(
    tier: Residency, state: AdapterState, listed: bool
) -> None:
    seen = Seen()
    adapter = AdapterStatus("x", "/x", state)
    away = ResidencyStatus("on_demand", tier)
    status = ModelStatus("m", "echo", "x", 0, (), INFO, adapters=(adapter,), residence=away)
    seen.router.apply_topology(Topology((status,)))
    assert [one.status.name for one in seen.router.models()] == ["m", *["x"] * listed]
    if listed:
        seen.router.queue_call(call("x"))
    else:
        with pytest.raises(ModelUnavailable):
            seen.router.queue_call(call("x"))


async def test_without_requests_it_does_not_wake_up() -> None:
    with passing_time() as clock:
        seen = Seen()
        seen.stands("stopped")
        await clock.pass_time(1.0)
        for _ in range(2):
            clock.wakes.clear()
            await clock.pass_time(3600.0)
            assert len(clock.wakes) <= 1  # a deadline of the calls
            seen.told.clear()
            one, two = seen.router.queue_call(call()), seen.router.queue_call(call())
            one.cancel()
            await clock.pass_time(10 * EVERY_S)
            assert [m.waiting for m in seen.told if isinstance(m, ModelDemand)] == [1]
            two.cancel()
            await clock.pass_time(10 * EVERY_S)
            assert [m.waiting for m in seen.told if isinstance(m, ModelDemand)] == [1, 0]


async def test_what_went_meanwhile_is_told_anew() -> None:
    seen = Seen()
    seen.stands("resident")
    seen.stands("stopped")
    assert len(seen.told) == 2
    seen.stands("stopped")
    assert len(seen.told) == 2


async def test_who_waits_in_vain_is_told_why() -> None:
    seen = Seen()
    seen.stands("coming")
    waiting = seen.router.queue_call(call())
    seen.stands("failed")
    with pytest.raises(ModelUnavailable, match="cannot serve: why"):
        await waiting.next_delta()
    with pytest.raises(ModelUnavailable, match="cannot serve: why"):
        seen.router.queue_call(call())
    seen.stands("stopped", "manual")
    with pytest.raises(ModelUnavailable, match="`servekit load m` does it"):
        seen.router.queue_call(call())


@pytest.mark.parametrize(
    ("tier", "load", "available"),
    [
        ("stopped", "on_demand", True),
        ("asleep", "manual", True),
        ("stopped", "manual", True),
        ("failed", "on_demand", False),
        ("coming", "on_demand", True),
        ("coming", "on_start", False),
    ],
)
async def test_what_counts_as_ready(tier: Residency, load: LoadMode, available: bool) -> None:
    seen = Seen()
    seen.stands(tier, load)
    assert seen.router.routes["m"].available is available


async def test_a_model_never_loaded_is_loaded_before_it_is_asked() -> None:
    seen = Seen()
    seen.stands("stopped", info=None)
    route = seen.router.routes["m"]
    asking = asyncio.create_task(seen.router.demand.until_known(route))
    await asyncio.sleep(0)
    assert seen.told[-1] == ModelDemand("m", 1, 0, 0.0)
    seen.stands("resident")
    assert await asking
    assert not await seen.router.demand.until_known(route)
    seen.stands("failed", info=None)
    with pytest.raises(ModelUnavailable, match="why"):
        await seen.router.demand.until_known(route)
