"""Requests under way, by the names that the core has for them, and by their jobs.

The worker's I/O thread begins and cancels, the engine's thread tells what has come. Once `cancel`
has returned, nothing more of its job is told: a step is told under a lock that a cancellation
takes, and nobody else; what a step has brought is made up before, outside it.
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
    """A job with texts: where each one's vector belongs, and those that have come."""

    places: dict[str, int]  # by the core's names
    vectors: list[bytes]
    left: int

    @classmethod
    def of(cls, names: Sequence[str]) -> Embedding:
        return cls({name: at for at, name in enumerate(names)}, [b""] * len(names), len(names))


class RequestTable:
    """All requests of one engine. `on_first` is called when it has been idle and gets one."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.jobs: dict[str, int] = {}  # job by the core's name; to be read by any thread
        self.embeddings: dict[int, Embedding] = {}  # by job; likewise
        self._names: dict[int, Collection[str]] = {}  # of a job
        self._on_first = on_first
        self._changing = threading.Lock()
        self._telling = threading.RLock()  # who is told may cancel
        self._over = False
        self.left = 0  # cancelled so far

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._names

    def begin(self, job_id: int, names: Sequence[str], texts: Embedding | None = None) -> None:
        """Raises WorkerLost once it is over, RequestError for a job that is held already."""
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

    def forget(self, job_id: int) -> list[str]:
        """The names that the core had for it; none where it is not held."""
        with self._changing:
            names = self._names.pop(job_id, ())
            self.embeddings.pop(job_id, None)
            for name in names:
                self.jobs.pop(name, None)
        return list(names)

    def cancel(self, job_id: int) -> list[str]:
        """As `forget`; waits for a step that is being told."""
        with self._telling:
            names = self.forget(job_id)
            self.left += 1  # not before: who reads it next must not find the job
            return names

    def tell(self, made: Sequence[StepOutput], since: int, emit: Emit) -> None:
        """Hand on what came, but for jobs that are gone; `since` is `left` when it was made."""
        with self._telling:
            if self.left != since:
                made = [output for output in made if output.id in self._names]
            for output in made:
                if output.finish is not None or output.error is not None:
                    self.forget(output.id)
            if made:
                emit(made)

    def end(self) -> None:
        """Forget all, tell nothing more of it, and take nothing more."""
        with self._telling, self._changing:
            self._over = True
            self.left += 1
            self._names.clear()
            self.jobs.clear()
            self.embeddings.clear()
