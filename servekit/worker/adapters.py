"""Loading and unloading of adapters while the worker serves, one at a time and in message order.

The engine loads in a thread, so pings are still answered. An adapter to be unloaded is first closed
to new requests; once its last request has ended, the engine unloads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from servekit.errors import LoadError, RequestError
from servekit.protocol.adapters import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from servekit.worker.runner import STEP_S, Runner

log: Any = structlog.get_logger("servekit.worker")

Order = LoadAdapter | UnloadAdapter
Answer = AdapterLoaded | AdapterUnloaded | AdapterRefused

#: Interval between checks whether an adapter's last request has ended.
_LOOK_EVERY_S = 0.02


class Adapters:
    """Executor of the supervisor's adapter commands; answers each command."""

    def __init__(self, runner: Runner, send: Callable[[Answer], None]) -> None:
        self._runner = runner
        self._send = send
        self._orders: asyncio.Queue[Order] = asyncio.Queue()
        self._working = asyncio.get_running_loop().create_task(self._run_orders())

    def handle_order(self, order: Order) -> None:
        """Queue a command of the supervisor behind those not yet carried out."""
        self._orders.put_nowait(order)

    def close(self) -> None:
        self._working.cancel()

    async def _run_orders(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                async with self._runner.engine_turn:
                    answer = await self._carry_out(order)
            except (RequestError, LoadError) as error:
                invalid = isinstance(error, RequestError) and error.status < 500
                answer = AdapterRefused(order.seq, error.message, invalid)
            except Exception as error:
                log.exception("adapter_change_failed", order=repr(order))
                answer = AdapterRefused(order.seq, f"{type(error).__name__}: {error}", False)
            self._send(answer)

    async def _carry_out(self, order: Order) -> Answer:
        if isinstance(order, LoadAdapter):
            return await self._load_adapter(order)
        return await self._unload_adapter(order)

    async def _load_adapter(self, order: LoadAdapter) -> AdapterLoaded:
        name, served = order.adapter.name, self._runner.adapters
        if name in served:
            raise RequestError(f"the adapter {name!r} is loaded already")
        info = await asyncio.to_thread(self._runner.engine.load_adapter, order.adapter)
        await asyncio.to_thread(self._runner.identify_adapters, [order.adapter])
        served[name] = info.virtual_tokens
        log.info("adapter_loaded", adapter=name, kind=info.kind, mode=info.mode)
        return AdapterLoaded(order.seq, info)

    async def _unload_adapter(self, order: UnloadAdapter) -> AdapterUnloaded:
        name, runner = order.name, self._runner
        if name not in runner.adapters:
            raise RequestError(f"the adapter {name!r} is not loaded")
        runner.closing_adapter = name
        try:
            while runner.uses(name):  # noqa: ASYNC110 - jobs end in many ways
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            runner.closing_adapter = ""
        taken = runner.adapters.pop(name)
        await asyncio.sleep(STEP_S)  # a cancelled request may still be in the current step
        try:
            await asyncio.to_thread(runner.engine.unload_adapter, name)
        except Exception:
            runner.adapters[name] = taken  # still loaded: it continues to serve
            raise
        log.info("adapter_unloaded", adapter=name)
        return AdapterUnloaded(order.seq, name)
