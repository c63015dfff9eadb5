"""The engine core's client: vLLM's own for programs without asyncio, used from several threads.

Its socket is one, so what is sent goes under a lock; what comes is read by a thread of vLLM's and
waits in a queue.
"""

from __future__ import annotations

import itertools
import logging
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from servekit.engines.vllm import causes, library
from servekit.engines.vllm.causes import Causes, first_line
from servekit.errors import EngineFailed, LoadError

log = logging.getLogger(__name__)

#: How long the core may take for what is no request: to load an adapter, to sleep, to wake.
_CALL_S = 600.0
#: How often it is looked whether it is alive meanwhile.
_LOOK_EVERY_S = 0.2
#: How long a process that has ended may take to say how, and what it has told to arrive.
_CAUSE_S = 1.0


class Core:
    """One vLLM engine core in processes of its own, of this process group."""

    def __init__(self, asked: dict[str, Any], model: str) -> None:
        """Start it, and wait until it has loaded. `asked` are `vllm.EngineArgs`.

        Raises LoadError.
        """
        self._client, self._causes = _start(asked, model)
        self._sending = threading.Lock()
        self._calls = itertools.count(1)
        self._closing = False
        self._exit_code: int | None = None
        self._gone = threading.Event()  # a process of the core's has ended by itself
        threading.Thread(target=self._watch, name="core watch", daemon=True).start()

    @property
    def config(self) -> Any:
        """vLLM's `VllmConfig`, with what the core has found out."""
        return self._client.vllm_config

    @property
    def dead(self) -> bool:
        return self._gone.is_set() or bool(self._client.resources.engine_dead)

    def death(self) -> EngineFailed:
        """Why it is dead, in a sentence."""
        told = self._causes.first(_CAUSE_S if self._exit_code is None else 0.0)
        return EngineFailed(causes.sentence(told, self._exit_code))

    def _watch(self) -> None:
        """Wake the engine's loop as soon as a process of the core's ends.

        vLLM's own monitor does that late: it puts the remaining processes away first.
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
        # vLLM's monitor waits for the same process: who asks second is told in a moment
        while (code := process.exitcode) is None and time.monotonic() < until:
            time.sleep(0.001)
        self._exit_code = code
        self._gone.set()
        self._client.outputs_queue.put(self.death())

    def add(self, made: Sequence[Any]) -> None:
        """Send requests. Raises what vLLM does where the core is dead, or one cannot be sent.

        Those that were sent before are aborted then.
        """
        with self._sending:
            for at, request in enumerate(made):
                try:
                    self._client.add_request(request)
                except Exception:
                    self._abort([sent.request_id for sent in made[:at]])
                    raise

    def abort(self, names: list[str]) -> None:
        """Give requests up; names that the core does not know are ignored, and so is its death."""
        with self._sending:
            self._abort(names)

    def _abort(self, names: list[str]) -> None:
        try:
            self._client.abort_requests(names)
        except Exception as error:  # it dies just now, and its requests with it
            log.warning("cannot abort: %s", first_line(error))

    def call(self, method: str, *args: Any) -> Any:
        """Have the core do something else, and wait for it.

        As `SyncMPClient.call_utility`, which would hold the socket until it is answered. Raises
        Exception with the core's own words, EngineFailed if it dies over it.
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

    def next(self, timeout_s: float) -> Any | None:
        """What the next step has brought, an `EngineCoreOutputs`; None if nothing has come.

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
        if isinstance(found, Exception):  # vLLM's, which says that the core is dead and no more
            raise self.death() from found
        return found

    def close(self) -> None:
        self._closing = True
        processes = self._client.resources.engine_manager.processes
        self._client.shutdown()
        for process in processes:
            process.join(_CAUSE_S)  # vLLM kills what is late and does not wait for it
        self._causes.close()


def _start(asked: dict[str, Any], model: str) -> tuple[Any, Causes]:
    library.check()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.executor import Executor

    try:
        config = EngineArgs(**asked).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # vLLM raises many kinds for what it does not support
        raise LoadError(f"vLLM refuses {model}: {first_line(error)}") from error
    ahead = config.scheduler_config.async_scheduling
    kind = "Ahead" if ahead else "InStep"
    config.scheduler_config.scheduler_cls = f"servekit.engines.vllm.scheduler.{kind}"
    config.parallel_config.worker_cls = "servekit.engines.vllm.worker_extension.Rank"
    told = Causes(config)
    try:
        return SyncMPClient(config, Executor.get_class(config), log_stats=True), told
    except Exception as error:
        told.close()
        raise LoadError(
            f"vLLM's engine did not start; the lines before this say why ({first_line(error)}).",
            permanent=False,
        ) from error


def wait_for(answer: Future[Any], dead: Callable[[], bool], limit_s: float) -> Any:
    """What the core answers. vLLM leaves open for good what a core has died over."""
    until = time.monotonic() + limit_s
    while not futures.wait([answer], _LOOK_EVERY_S).done:
        if dead():
            raise EngineFailed("vLLM's engine core has died.")
        if time.monotonic() > until:
            raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()
