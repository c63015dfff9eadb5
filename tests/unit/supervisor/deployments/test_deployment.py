"""What a reload changes in a fleet whose workers go on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from servekit.supervisor.deployments.deployment import Deployment
from servekit.supervisor.deployments.replica_host import ReplicaHost
from servekit.supervisor.workers.worker_process import WorkerProcess
from tests.unit.supervisor.made_up_fleet import config


async def test_new_limits_count_for_the_replicas_that_there_are() -> None:
    fleet = Deployment(
        config(max_queue=5), cast(ReplicaHost, SimpleNamespace(host=None, start=None))
    )
    retried: list[bool] = []
    old: Any = SimpleNamespace(
        model=fleet.model, state="ready", ending=False, retry=lambda: retried.append(True)
    )
    fleet.replicas.append(cast(WorkerProcess, old))
    new = config(max_queue=7, timeout_s=7.0, stall_timeout_s=9.0)
    fleet.become(new, fleet.planned, None)
    assert fleet.model is new and old.model is new
    assert retried == [True]
    other = config(path="another")
    fleet.become(other, fleet.planned, None)
    assert fleet.model is other
    assert old.model is new, "it has loaded the one before"
