"""Helpers that wait for the tasks of managed processes, and for work within them."""

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
    """The way a process is to end: the message for its child, and the grace time."""

    ask: msgspec.Struct
    grace_s: float


async def ended(tasks: Tasks, within_s: float) -> set[str]:
    """Wait for tasks to end; return the names of those that did not. Raises a task's exception."""
    if not tasks:
        return set()
    done, pending = await asyncio.wait(tasks, timeout=within_s)
    for task in done:
        task.result()
    return {task.get_name() for task in pending}


async def unless(over: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; cancel it and return None if `over` is done first."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def undisturbed(over: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, Any]) -> bool:
    """Return whether `work` was done before `over`; the first to end cancels the other."""
    told = asyncio.get_running_loop().create_task(over)
    try:
        await unless(told, work)
        if told.done():
            told.result()
        return not told.done()
    finally:
        told.cancel()
