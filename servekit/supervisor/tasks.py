"""Waiting for the tasks that run lives, and for what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Tasks = set[asyncio.Task[None]]


async def ended(tasks: Tasks, within_s: float) -> set[str]:
    """Wait for lives to end; the names of those that did not. Raises what broke one off."""
    if not tasks:
        return set()
    done, pending = await asyncio.wait(tasks, timeout=within_s)
    for task in done:
        task.result()
    return {task.get_name() for task in pending}


async def unless(over: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None, and it is cancelled, if `over` is done before."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.wait((task,))
