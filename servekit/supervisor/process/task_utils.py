"""Waiting for the tasks that run lives, and for what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Tasks = set[asyncio.Task[None]]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """How a life is to end: what its child is told, and how long that may take."""

    ask: msgspec.Struct
    grace_s: float


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


async def undisturbed(over: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, Any]) -> bool:
    """Whether `work` was done before `over` was; whichever is first cancels the other."""
    told = asyncio.get_running_loop().create_task(over)
    try:
        await unless(told, work)
        if told.done():
            told.result()
        return not told.done()
    finally:
        told.cancel()
