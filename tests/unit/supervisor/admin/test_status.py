"""What gateways are told of a model: what its section of the file says now."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.supervisor.admin import status
from servekit.supervisor.deployments.deployment import Deployment
from tests.unit.supervisor.made_up_deployment import config


def fleet_of(**keys: Any) -> Deployment:
    known: dict[str, Any] = {"replicas": [], "info": None, "adapter_statuses": tuple, "scale": None}
    known["changing"] = False
    known |= {"fork_servers": SimpleNamespace(standbys=()), "left_out": "", "has_served": True}
    return cast(Deployment, SimpleNamespace(model=config(**keys), **known))


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("max_queue", 5, 7),
        ("timeout_s", 5.0, 7.0),
        ("quarantine_s", 5.0, 7.0),
        ("aliases", ("b",), ("c", "d")),
        ("routing", "least_loaded", "round_robin"),
    ],
)
def test_a_reload_is_told_to_gateways(key: str, before: object, after: object) -> None:
    deployment = fleet_of(**{key: before})
    assert getattr(status.of_model(deployment, 1, None), key) == before
    deployment.model = config(**{key: after})
    assert getattr(status.of_model(deployment, 1, None), key) == after
