"""Ownership of a Ray namespace: one instance at a time, the first that is alive.

Each supervisor's connection to Ray is a Ray job. Ray knows which jobs are alive: it notices a
driver's end at once, and the end of a driver's machine by health checks. servekit adds a note to
its job about the owner. Ray numbers jobs in the order of their arrival, so no clocks are compared,
and of two simultaneous instances the later one gives way. A supervisor that reconnects keeps its
number.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
from ray.job_config import JobConfig

#: Key of our note in a job's metadata.
_NOTE = "servekit"
#: Time for Ray to notice the end of a supervisor that was just killed.
_GOING_S = 5.0
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class NamespaceOwner:
    """An instance that owns a namespace, or wants to. `turn` is the number of its first job."""

    turn: int  # 0: none yet
    host: str
    pid: int  # the supervisor's
    since: float  # Unix time, s, by its own clock
    run_dir: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"on {self.host}, pid {self.pid}, run directory {self.run_dir}, since {since}"

    @classmethod
    def for_this_process(cls, turn: int, since: float, run_dir: str) -> NamespaceOwner:
        """Return the owner for the supervisor that has started this process."""
        return cls(turn, socket.gethostname(), os.getppid(), since, run_dir)

    @property
    def job_config(self) -> JobConfig:
        """Job configuration for the connection to Ray."""
        return JobConfig(metadata={_NOTE: json.dumps(asdict(self))})


@dataclass(frozen=True, slots=True)
class Job:
    """A living job, as Ray reports it."""

    number: int
    namespace: str
    notes: Mapping[str, str]

    @property
    def tenant(self) -> NamespaceOwner | None:
        """The owner in the job's note; None for other programs."""
        try:
            found = NamespaceOwner(**json.loads(self.notes[_NOTE]))
        except (KeyError, ValueError, TypeError):
            return None
        return found if found.turn else replace(found, turn=self.number)


def find_holder(jobs: Iterable[Job], namespace: str, turn: int) -> NamespaceOwner | None:
    """Return the owner that came before `turn`; None if there is none."""
    tenants = [job.tenant for job in jobs if job.namespace == namespace]
    before = [one for one in tenants if one is not None and one.turn < turn]
    return min(before, key=lambda one: one.turn, default=None)


async def await_ownership(namespace: str, turn: int) -> str:
    """Return why the namespace is not ours; "" if it is. Waits a moment for owners that exit."""
    until = time.monotonic() + _GOING_S
    while (
        first := find_holder(await asyncio.to_thread(_living_jobs), namespace, turn)
    ) is not None:
        if time.monotonic() >= until:
            return (
                f"its namespace {namespace!r} is held by another instance of servekit, {first}: end"
                " that one first, or give this one a `ray.namespace` of its own; Ray notices"
                " the loss of a machine within a minute"
            )
        await asyncio.sleep(_LOOK_EVERY_S)
    return ""


def own_turn(kept: int) -> int:
    """Return the turn of this process, unless its supervisor has `kept` an earlier one."""
    return kept or _job_number(bytes.fromhex(ray.get_runtime_context().get_job_id()))


def _living_jobs() -> list[Job]:
    """Return all living jobs. Blocks."""
    worker: Any = ray._private.worker.global_worker
    jobs = worker.gcs_client.get_all_job_info().values()  # no public API
    return [
        Job(_job_number(job.job_id), job.config.ray_namespace, dict(job.config.metadata))
        for job in jobs
        if not job.is_dead
    ]


def _job_number(job_id: bytes) -> int:
    return int.from_bytes(job_id, "little")
