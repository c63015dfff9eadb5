"""Helpers for a rolling update: replicas to keep, to add, to end; and whether they came up."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.protocol.messages import Stop
from servekit.supervisor.deployments.config_diff import Slots
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpus import Slot

#: From Stop to SIGTERM for a worker without requests.
STOP_GRACE_S = 5.0


def fit(slots: Slots, kept: Sequence[WorkerProcess]) -> tuple[list[Slot], list[WorkerProcess]]:
    """Return the slots without a replica of `kept`, and the replicas of `kept` without a slot."""
    missing, surplus = list(slots), []
    for replica in sorted(kept, key=lambda one: one.state != "ready"):
        if replica.place.gpus in missing:
            missing.remove(replica.place.gpus)
        else:
            surplus.append(replica)
    return missing, surplus


def serving(old: Sequence[WorkerProcess]) -> list[WorkerProcess]:
    """Return the ready replicas of another version; end the others, which are of no more use."""
    for replica in old:
        if replica.state != "ready":
            replica.end(Stop(), STOP_GRACE_S)
    return [replica for replica in old if replica.state == "ready"]


def ready(replicas: Sequence[WorkerProcess]) -> int:
    return sum(replica.state == "ready" for replica in replicas)


def enough(replicas: Sequence[WorkerProcess], count: int) -> bool:
    return ready(replicas) >= count or settled(replicas)


def settled(replicas: Sequence[WorkerProcess]) -> bool:
    """Return whether each replica has come up, failed or stopped."""
    return all(replica.state in ("ready", "failed", "stopped") for replica in replicas)
