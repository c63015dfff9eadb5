"""A sender thread for the texts of EmbedJobs, each of which is a request of its own to the core.

A job may have thousands of texts; checking and sending them at once would block the worker's event
loop. So a thread sends them in small batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from servekit.engines.api.base import EmbedJob, StepOutput
from servekit.engines.api.job_validation import Limits, check_inputs
from servekit.engines.vllm.core.causes import first_line
from servekit.engines.vllm.core.core_client import Core
from servekit.engines.vllm.request_table import RequestTable
from servekit.errors import RequestError

log: Any = structlog.get_logger(__name__)

#: Texts sent before the next check for cancellation; the socket is free for other senders in
#: between.
BATCH = 16


class Texts:
    """A sender of embedding jobs, one after the other.

    `make` builds the core's request from a name, a job and the place of a text in it; `fail`
    reports a failure.
    """

    def __init__(
        self,
        core: Core,
        held: RequestTable,
        limits: Limits,
        make: Callable[[str, EmbedJob, int], Any],
        fail: Callable[[StepOutput], None],
    ) -> None:
        self._core = core
        self._held = held
        self._limits = limits
        self._make = make
        self._fail = fail
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")

    def send(self, job: EmbedJob, names: Sequence[str]) -> None:
        """Queue the texts of a registered job, with their request names."""
        self._thread.submit(self._send_job, job, names)

    def close(self) -> None:
        """Stop sending; returns after the current batch."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _send_job(self, job: EmbedJob, names: Sequence[str]) -> None:
        try:
            check_inputs(job, self._limits)
            self._send_all(job, names)
        except RequestError as error:
            self._fail(StepOutput(job.id, [], error=error.message, param=error.param))
        except Exception as error:
            log.warning("embedding_submit_failed", reason=first_line(error))
            if not self._core.dead:  # if the core is dead, the job continues in another worker
                self._fail(StepOutput(job.id, [], error=explain_failure(error)))
        if job.id not in self._held:
            # Cancelled meanwhile; the abort may have come before the last texts. The core ignores
            # unknown and finished requests.
            self._core.abort_jobs(list(names))

    def _send_all(self, job: EmbedJob, names: Sequence[str]) -> None:
        for at in range(0, len(names), BATCH):
            if job.id not in self._held:
                return
            batch = enumerate(names[at : at + BATCH], at)
            self._core.add([self._make(name, job, place) for place, name in batch])


def explain_failure(error: Exception) -> str:
    """Return the error text for a request that could not be sent."""
    return f"vLLM cannot be sent this request: {first_line(error)}"
