"""The texts of EmbedJobs on their way to the core: each is a message of its own there.

A job may have thousands, which would hold the worker's event loop for as long as it takes to check
and to send them; so they are sent from a thread, a few at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servekit.engines.api.base import EmbedJob, StepOutput
from servekit.engines.api.job_validation import Limits, check_inputs
from servekit.engines.vllm.causes import first_line
from servekit.engines.vllm.core_client import Core
from servekit.engines.vllm.request_table import RequestTable
from servekit.errors import RequestError

log = logging.getLogger(__name__)

#: After so many it is looked whether anybody still wants them; the socket is free for others then.
BATCH = 16


class Texts:
    """Sends jobs one after the other.

    `make` makes the core's request of a name and token ids; what goes wrong is told by `fail`.
    """

    def __init__(
        self,
        core: Core,
        held: RequestTable,
        limits: Limits,
        make: Callable[[str, list[int]], Any],
        fail: Callable[[StepOutput], None],
    ) -> None:
        self._core = core
        self._held = held
        self._limits = limits
        self._make = make
        self._fail = fail
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")

    def send(self, job: EmbedJob, names: Sequence[str]) -> None:
        """Queue the texts of a job that is held, under their names."""
        self._thread.submit(self._send, job, names)

    def close(self) -> None:
        """Send nothing more; returns when what is being sent is."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _send(self, job: EmbedJob, names: Sequence[str]) -> None:
        try:
            check_inputs(job, self._limits)
            self._send_all(job, names)
        except RequestError as error:
            self._fail(StepOutput(job.id, [], error=error.message, param=error.param))
        except Exception as error:
            log.warning("cannot send texts: %s", first_line(error))
            if not self._core.dead:  # else the job goes on in another worker
                self._fail(StepOutput(job.id, [], error=why(error)))
        if job.id not in self._held:
            # Given up meanwhile, and the abort may have come before the last of them. To the core
            # what it does not know, or has done, is nothing.
            self._core.abort(list(names))

    def _send_all(self, job: EmbedJob, names: Sequence[str]) -> None:
        for at in range(0, len(names), BATCH):
            if job.id not in self._held:
                return
            batch = zip(names[at : at + BATCH], job.inputs[at : at + BATCH], strict=True)
            self._core.add([self._make(name, ids) for name, ids in batch])


def why(error: Exception) -> str:
    """What to say of a request that could not be sent."""
    return f"vLLM cannot be sent this request: {first_line(error)}"
