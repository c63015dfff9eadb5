"""The engine core's client: vLLM's own for programs without asyncio, used from several threads.

Its socket is one, so what is sent goes under a lock; what comes is read by a thread of vLLM's and
waits in a queue.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

from servekit.errors import EngineFailed, LoadError

log = logging.getLogger(__name__)

#: Releases that this was written for and tried with; pyproject.toml bounds the extra likewise.
KNOWN = "0.20."
#: How long the core may take for what is no request: to load an adapter, to sleep, to wake.
_CALL_S = 600.0
#: How often it is looked whether it is alive meanwhile.
_LOOK_EVERY_S = 0.2
_DEAD = "vLLM's engine core has died; its log says why."


class Core:
    """One vLLM engine core in processes of its own, of this process group."""

    def __init__(self, asked: dict[str, Any], model: str) -> None:
        """Start it, and wait until it has loaded. `asked` are `vllm.EngineArgs`.

        Raises LoadError.
        """
        self._client = _start(asked, model)
        self._sending = threading.Lock()
        self._calls = itertools.count(1)

    @property
    def config(self) -> Any:
        """vLLM's `VllmConfig`, with what the core has found out."""
        return self._client.vllm_config

    @property
    def dead(self) -> bool:
        return bool(self._client.resources.engine_dead)

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
        return wait_for(answer, lambda: self.dead, _CALL_S)

    def next(self, timeout_s: float) -> Any | None:
        """What the next step has brought, an `EngineCoreOutputs`; None if nothing has come.

        Raises EngineFailed once the core is dead.
        """
        try:
            found = self._client.outputs_queue.get(timeout=timeout_s)
        except queue.Empty:
            if self.dead:
                raise EngineFailed(_DEAD) from None
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._client.shutdown()


def _start(asked: dict[str, Any], model: str) -> Any:
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.core_client import SyncMPClient
        from vllm.v1.executor import Executor
    except ImportError as error:
        raise LoadError(
            f"vLLM cannot be imported: {error}. pip install 'servekit[vllm]'"
        ) from error
    if not version().startswith(KNOWN):
        raise LoadError(
            f"This engine is written for vLLM {KNOWN} and uses parts of it that change; here is "
            f"{version()}. pip install 'servekit[vllm]' brings the right one."
        )
    try:
        config = EngineArgs(**asked).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # vLLM raises many kinds for what it does not support
        raise LoadError(f"vLLM refuses {model}: {first_line(error)}") from error
    ahead = config.scheduler_config.async_scheduling
    kind = "Ahead" if ahead else "InStep"
    config.scheduler_config.scheduler_cls = f"servekit.engines.vllm.scheduler.{kind}"
    config.parallel_config.worker_cls = "servekit.engines.vllm.ranks.Rank"
    try:
        return SyncMPClient(config, Executor.get_class(config), log_stats=True)
    except Exception as error:
        raise LoadError(
            f"vLLM's engine did not start; the lines before this say why ({first_line(error)}).",
            permanent=False,
        ) from error


def wait_for(answer: Future[Any], dead: Callable[[], bool], limit_s: float) -> Any:
    """What the core answers. vLLM leaves open for good what a core has died over."""
    until = time.monotonic() + limit_s
    while not futures.wait([answer], _LOOK_EVERY_S).done:
        if dead():
            raise EngineFailed(_DEAD)
        if time.monotonic() > until:
            raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()


def version() -> str:
    import vllm

    return str(vllm.__version__)


def first_line(error: BaseException) -> str:
    """The beginning of what an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:500]
