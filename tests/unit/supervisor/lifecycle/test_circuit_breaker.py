"""What the breaker says, and for whom it never opens."""

from __future__ import annotations

import time
from typing import Any

import pytest

from servekit.config.schema import ModelConfig
from servekit.supervisor.lifecycle.restart_policy import (
    ENDPOINT_S,
    BreakerLimits,
    CircuitBreaker,
    make_circuit_breaker,
    make_restart_policy,
)

REMOTE = {"engine": "openai", "options": {"url": "http://x/v1"}}


def model(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "path": "p", "engine": "echo", **keys})


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def test_after_a_probe_it_says_when_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now = began = time.monotonic()
    wall = time.time()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: wall + now - began)
    circuit = CircuitBreaker("m", BreakerLimits(lives=1, first_s=100))
    circuit.started("m/0")
    circuit.record_failure("m/0", "it broke")
    said = circuit.explain()
    assert f"last attempt at {clock(wall)}, next attempt at {clock(wall + 100)}" in said
    now += 100
    circuit.started("m/1")
    assert f"only m/1 is being tried, since {clock(wall + 100)}" in circuit.explain()
    now += 10
    circuit.record_failure("m/1", "it broke again")
    said = circuit.explain()
    assert "it broke again" in said
    assert f"last attempt at {clock(wall + 100)}, next attempt at {clock(wall + 310)}" in said


@pytest.mark.parametrize("permanent", [True, False])
def test_what_would_be_the_same_again_does_not_open_it(permanent: bool) -> None:
    """Such a replica is not tried again; those that were of use close it."""
    circuit = CircuitBreaker("m", BreakerLimits(lives=2))
    for _ in range(2):
        circuit.started("m/0")
        circuit.died("m/0", "there is no such file", fruitful=False, permanent=permanent)
    assert circuit.state == ("closed" if permanent else "open")
    circuit.died("m/1", "", fruitful=True, permanent=False)
    assert circuit.state == "closed"


@pytest.mark.parametrize(("keys", "opens"), [({}, True), (REMOTE, False)])
def test_an_endpoint_that_is_down_is_no_crash_loop(keys: dict[str, Any], opens: bool) -> None:
    circuit, policy = make_circuit_breaker(model(**keys)), make_restart_policy(model(**keys))
    for _ in range(20):
        circuit.started("m/0")
        circuit.record_failure("m/0", "it does not answer")
        pause_s = policy.after_s(fruitful=False)
    assert (circuit.state == "open") is opens
    assert (pause_s > 1.3 * ENDPOINT_S) is opens


def test_more_replicas_may_die_in_a_row() -> None:
    """A few deadly requests take each of them down before they are quarantined."""
    circuit = CircuitBreaker("m", BreakerLimits(lives=2))
    for name in ("m/0", "m/1", "m/2"):
        circuit.join(name, lambda: None)
    for died in range(6):
        assert circuit.state == "closed", died
        circuit.record_failure(f"m/{died % 3}", "it broke")
    assert circuit.state == "open"
