"""The requests in flight, by their names in the core and by job.

The worker's I/O thread adds and cancels, the engine's thread emits outputs. After `cancel` has
returned, no output of its job is emitted: outputs are emitted under a lock that only cancellations
share; they are built before, outside the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from servekit.engines.api.base import Emit, StepOutput
from servekit.errors import RequestError, WorkerLost

GONE = "The engine has stopped; the worker is being restarted."


@dataclass(slots=True)
class Embedding:
    """The state of an embedding job: the position of each text and the vectors received so far."""

    places: dict[str, int]  # by request name
    vectors: list[bytes]
    left: int

    @classmethod
    def from_names(cls, names: Sequence[str]) -> Embedding:
        return cls({name: at for at, name in enumerate(names)}, [b""] * len(names), len(names))


class RequestTable:
    """The requests of one engine.

    `on_first` is called when the first request comes after idle time.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.jobs: dict[str, int] = {}  # job by request name; any thread may read it
        self.embeddings: dict[int, Embedding] = {}  # by job; any thread may read it
        self._names: dict[int, Collection[str]] = {}  # request names by job
        self._on_first = on_first
        self._changing = threading.Lock()
        self._telling = threading.RLock()  # reentrant: the receiver may cancel
        self._over = False
        self.left = 0  # number of cancellations so far

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._names

    def add_job(self, job_id: int, names: Sequence[str], texts: Embedding | None = None) -> None:
        """Register a job.

        Raises WorkerLost after `remove_all`, RequestError if the job is registered already.
        """
        with self._changing:
            if self._over:
                raise WorkerLost(GONE)
            if job_id in self._names:
                raise RequestError(f"Request id {job_id} is already in flight.")
            if not self._names:
                self._on_first()
            self._names[job_id] = names
            if texts is not None:
                self.embeddings[job_id] = texts
            self.jobs.update(dict.fromkeys(names, job_id))

    def remove_job(self, job_id: int) -> list[str]:
        """Remove a job and return its request names; empty if it is not registered."""
        with self._changing:
            names = self._names.pop(job_id, ())
            self.embeddings.pop(job_id, None)
            for name in names:
                self.jobs.pop(name, None)
        return list(names)

    def cancel(self, job_id: int) -> list[str]:
        """Remove a job as `remove_job` does, after any step that is being emitted."""
        with self._telling:
            names = self.remove_job(job_id)
            self.left += 1  # must follow `remove_job`: a later reader must not find the job
            return names

    def emit_outputs(self, made: Sequence[StepOutput], since: int, emit: Emit) -> None:
        """Emit outputs, without those of removed jobs; `since` is `left` when they were built."""
        with self._telling:
            if self.left != since:
                made = [output for output in made if output.id in self._names]
            for output in made:
                if output.finish is not None or output.error is not None:
                    self.remove_job(output.id)
            if made:
                emit(made)

    def remove_all(self) -> None:
        """Remove all jobs; emit nothing more, and accept no more jobs."""
        with self._telling, self._changing:
            self._over = True
            self.left += 1
            self._names.clear()
            self.jobs.clear()
            self.embeddings.clear()
