"""A thread-safe client of the engine core, based on vLLM's client for programs without asyncio.

There is a single socket, so sending requires a lock; a thread of vLLM reads the outputs into a
queue.
"""

from __future__ import annotations

import itertools
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import structlog

from servekit.engines.vllm.core import causes, core_host
from servekit.engines.vllm.core.causes import Causes, first_line
from servekit.errors import EngineFailed, LoadError

log: Any = structlog.get_logger(__name__)

#: Time limit of calls that are not requests: loading an adapter, sleeping, waking.
_CALL_S = 600.0
#: Interval of the checks that the core is alive during a call.
_LOOK_EVERY_S = 0.2
#: Time in which a dead process's exit code and reported error become available.
_CAUSE_S = 1.0


class Core:
    """A vLLM engine core, in processes of its own within this process group."""

    def __init__(self, asked: dict[str, Any], model: str) -> None:
        """Start the core with `asked`, arguments of `vllm.EngineArgs`, and wait for its load.

        Raises LoadError.
        """
        self._client, self._causes = _start_core(asked, model)
        self._sending = threading.Lock()
        self._calls = itertools.count(1)
        self._closing = False
        self._exit_code: int | None = None
        self._gone = threading.Event()  # set when a process of the core has ended by itself
        threading.Thread(target=self._watch_processes, name="core watch", daemon=True).start()

    @property
    def config(self) -> Any:
        """vLLM's `VllmConfig`, with the values that the core has determined."""
        return self._client.vllm_config

    @property
    def dead(self) -> bool:
        return self._gone.is_set() or bool(self._client.resources.engine_dead)

    def death(self) -> EngineFailed:
        """Return the cause of the core's death as an error."""
        told = self._causes.first(_CAUSE_S if self._exit_code is None else 0.0)
        return EngineFailed(causes.describe_death(told, self._exit_code))

    def _watch_processes(self) -> None:
        """Wake the engine's loop as soon as a process of the core ends.

        vLLM's own monitor reports it late: it ends the remaining processes first.
        """
        processes = {one.sentinel: one for one in self._client.resources.engine_manager.processes}
        ends = select.poll()
        for sentinel in processes:
            ends.register(sentinel, select.POLLIN)
        (ended, _), *_ = ends.poll()
        if self._closing:
            return
        process = processes[ended]
        until = time.monotonic() + _CAUSE_S
        # vLLM's monitor waits for the same process; if it reaps first, the exit code appears a
        # moment later
        while (code := process.exitcode) is None and time.monotonic() < until:
            time.sleep(0.001)
        self._exit_code = code
        self._gone.set()
        self._client.outputs_queue.put(self.death())

    def add(self, made: Sequence[Any]) -> None:
        """Send requests. Raises vLLM's error if the core is dead or a request cannot be sent.

        In that case the requests that were already sent are aborted.
        """
        with self._sending:
            for at, request in enumerate(made):
                try:
                    self._client.add_request(request)
                except Exception:
                    self._abort_unlocked([sent.request_id for sent in made[:at]])
                    raise

    def abort_jobs(self, names: list[str]) -> None:
        """Abort requests; unknown names and the core's death are ignored."""
        with self._sending:
            self._abort_unlocked(names)

    def _abort_unlocked(self, names: list[str]) -> None:
        try:
            self._client.abort_requests(names)
        except Exception as error:  # the core is dying, and its requests with it
            log.warning("abort_failed", reason=first_line(error))

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the core and wait for the result.

        Replaces `SyncMPClient.call_utility`, which would block the socket meanwhile. Raises
        Exception with the core's own message, EngineFailed if the core dies.
        """
        from vllm.v1.engine import EngineCoreRequestType

        call_id = next(self._calls)
        answer: Future[Any] = Future()
        self._client.utility_results[call_id] = answer
        with self._sending:
            self._client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
        try:
            return wait_for(answer, lambda: self.dead, _CALL_S)
        except EngineFailed:
            raise self.death() from None

    def read_outputs(self, timeout_s: float) -> Any | None:
        """Return the `EngineCoreOutputs` of the next step; None if none comes within `timeout_s`.

        Raises EngineFailed once the core is dead.
        """
        try:
            found = self._client.outputs_queue.get(timeout=timeout_s)
        except queue.Empty:
            if self.dead:
                raise self.death() from None
            return None
        if isinstance(found, EngineFailed):
            raise found
        if isinstance(found, Exception):  # vLLM's error, which only says that the core is dead
            raise self.death() from found
        return found

    def close(self) -> None:
        self._closing = True
        processes = self._client.resources.engine_manager.processes
        self._client.shutdown()
        for process in processes:
            process.join(_CAUSE_S)  # vLLM kills slow processes without waiting for them
        self._causes.close()


def make_config(asked: dict[str, Any], model: str) -> Any:
    """Return vLLM's `VllmConfig`, with our scheduler and worker. Raises LoadError.

    For equal settings, its key of the compile cache is that of `vllm serve`.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        config = EngineArgs(**asked).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # vLLM raises many types for unsupported settings
        raise LoadError(f"vLLM refuses {model}: {explain_refusal(error)}") from error
    kind = "Ahead" if config.scheduler_config.async_scheduling else "InStep"
    config.scheduler_config.scheduler_cls = f"servekit.engines.vllm.core.scheduler.{kind}"
    config.parallel_config.worker_cls = "servekit.engines.vllm.core.worker_extension.Rank"
    config.model_config.runner = "auto"  # it is chosen by now; `vllm serve` states none
    return config


def _start_core(asked: dict[str, Any], model: str) -> tuple[Any, Causes]:
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.executor import Executor

    config = make_config(asked, model)
    told = Causes(config)
    try:
        with core_host.core_in_host():
            return SyncMPClient(config, Executor.get_class(config), log_stats=True), told
    except Exception as error:
        explained = causes.explain_start(told.first(_CAUSE_S), error)
        told.close()
        raise explained from error


def explain_refusal(error: Exception) -> str:
    """Return the reasons for an error of vLLM's configuration, which pydantic may have raised."""
    if not callable(details := getattr(error, "errors", None)):
        return first_line(error)
    reasons = [(".".join(map(str, one["loc"])), one["msg"]) for one in details()]
    return "; ".join(f"{place}: {reason}" if place else reason for place, reason in reasons)


def wait_for(answer: Future[Any], dead: Callable[[], bool], limit_s: float) -> Any:
    """Return the core's answer. vLLM never completes the future if the core dies, so this polls."""
    until = time.monotonic() + limit_s
    while not futures.wait([answer], _LOOK_EVERY_S).done:
        if dead():
            raise EngineFailed("vLLM's engine core has died.")
        if time.monotonic() > until:
            raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()
