"""Whose namespace it is: one instance's at a time, whoever came first and lives.

Each supervisor's connection to Ray is a job of Ray's, which knows who lives: it sees a driver's end
at once, and that of a driver's machine by its own health checks. What servekit adds is a note on
its job, who holds it. Jobs are numbered by Ray in the order in which they came, so that nobody's
clock counts, and of two that come at once the later one goes. A supervisor whose connection is made
anew keeps its turn.
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

#: What our note on a job is called.
_NOTE = "servekit"
#: For Ray to see that a driver has ended whose supervisor was killed a moment ago.
_GOING_S = 5.0
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class NamespaceOwner:
    """An instance that holds a namespace, or wants to. `turn` is the number of its first job."""

    turn: int  # 0: it has none yet
    host: str
    pid: int  # the supervisor's
    since: float  # Unix time, s, by its own clock
    run_dir: str

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"on {self.host}, pid {self.pid}, run directory {self.run_dir}, since {since}"

    @classmethod
    def here(cls, turn: int, since: float, run_dir: str) -> NamespaceOwner:
        """The supervisor that has started this process."""
        return cls(turn, socket.gethostname(), os.getppid(), since, run_dir)

    @property
    def note(self) -> JobConfig:
        """To connect to Ray with."""
        return JobConfig(metadata={_NOTE: json.dumps(asdict(self))})


@dataclass(frozen=True, slots=True)
class Job:
    """A job that lives, as Ray knows it."""

    number: int
    namespace: str
    notes: Mapping[str, str]

    @property
    def tenant(self) -> NamespaceOwner | None:
        """Who holds it; None for somebody else's program."""
        try:
            found = NamespaceOwner(**json.loads(self.notes[_NOTE]))
        except (KeyError, ValueError, TypeError):
            return None
        return found if found.turn else replace(found, turn=self.number)


def holder(jobs: Iterable[Job], namespace: str, turn: int) -> NamespaceOwner | None:
    """Who was there before the one whose turn that is; None where nobody was."""
    tenants = [job.tenant for job in jobs if job.namespace == namespace]
    before = [one for one in tenants if one is not None and one.turn < turn]
    return min(before, key=lambda one: one.turn, default=None)


async def refusal(namespace: str, turn: int) -> str:
    """Why the namespace is not ours, a sentence; "" if it is. After a moment, for who is going."""
    until = time.monotonic() + _GOING_S
    while (first := holder(await asyncio.to_thread(_jobs), namespace, turn)) is not None:
        if time.monotonic() >= until:
            return (
                f"its namespace {namespace!r} is held by another instance of servekit, {first}: end"
                " that one first, or give this one a `ray.namespace` of its own; of a machine that"
                " is gone Ray learns within a minute"
            )
        await asyncio.sleep(_LOOK_EVERY_S)
    return ""


def own_turn(kept: int) -> int:
    """The turn of this process, if its supervisor has not `kept` one from before."""
    return kept or _number(bytes.fromhex(ray.get_runtime_context().get_job_id()))


def _jobs() -> list[Job]:
    """All that live. Blocks."""
    worker: Any = ray._private.worker.global_worker
    jobs = worker.gcs_client.get_all_job_info().values()  # there is no public way
    return [
        Job(_number(job.job_id), job.config.ray_namespace, dict(job.config.metadata))
        for job in jobs
        if not job.is_dead
    ]


def _number(job_id: bytes) -> int:
    return int.from_bytes(job_id, "little")
