"""Which replicas of a model stay, go and have come up as one version of it follows another."""

from __future__ import annotations

from collections.abc import Sequence

from servekit.protocol.messages import Stop
from servekit.supervisor.deployments.config_diff import Slots
from servekit.supervisor.workers.worker_process import WorkerProcess
from servekit.system.gpus import Slot

#: From Stop to SIGTERM for a worker that serves nobody.
STOP_GRACE_S = 5.0


def fit(slots: Slots, kept: Sequence[WorkerProcess]) -> tuple[list[Slot], list[WorkerProcess]]:
    """Which slots none of `kept` is in, and which of `kept` are in none."""
    missing, surplus = list(slots), []
    for replica in sorted(kept, key=lambda one: one.state != "ready"):
        if replica.place.gpus in missing:
            missing.remove(replica.place.gpus)
        else:
            surplus.append(replica)
    return missing, surplus


def serving(old: Sequence[WorkerProcess]) -> list[WorkerProcess]:
    """Those of another version that serve; the others are of no use any more, and ended."""
    for replica in old:
        if replica.state != "ready":
            replica.end(Stop(), STOP_GRACE_S)
    return [replica for replica in old if replica.state == "ready"]


def ready(replicas: Sequence[WorkerProcess]) -> int:
    return sum(replica.state == "ready" for replica in replicas)


def enough(replicas: Sequence[WorkerProcess], count: int) -> bool:
    return ready(replicas) >= count or settled(replicas)


def settled(replicas: Sequence[WorkerProcess]) -> bool:
    """Each has come up, or has been given up."""
    return all(replica.state in ("ready", "failed", "stopped") for replica in replicas)
